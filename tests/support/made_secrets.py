"""Made-up secrets and personal data in the surroundings in which agents' transcripts have them; and harmless texts.

Nothing here is real: each value is drawn. The forms are facts from the providers' documentation.
"""

import base64
import json
import random
import string
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from tests.support.builders import read_jsonl

ALNUM = string.ascii_letters + string.digits
URL_SAFE = ALNUM + "-_"
HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits


class Made(NamedTuple):
    """A text with a secret in it. `kind`: what it is, `surroundings`: where it stands."""

    kind: str
    surroundings: str
    secret: str
    text: str


def some(rng: random.Random, alphabet: str, length: int) -> str:
    """Return so many characters, letters and digits among them where the alphabet has them."""
    while True:
        text = "".join(rng.choices(alphabet, k=length))
        if length < 8 or any(c.isdigit() for c in text) or not any(c.isdigit() for c in alphabet):
            return text


def password(rng: random.Random) -> str:
    """Return a password as people and generators make them."""
    word = rng.choice(
        ["Summer", "hunter", "dragon", "Falcon", "correct", "Winter", "trustno", "s3cur3", "Qwerty", "monkey"]
    )
    forms: list[Callable[[], str]] = [
        lambda: f"{word}{rng.randint(1, 9999)}",
        lambda: f"{word}{rng.randint(1, 99)}{rng.choice('!@#%^*+-_')}",
        lambda: some(rng, ALNUM, rng.randint(8, 24)),
        lambda: some(rng, ALNUM + "!@#%^*_+-=?.~", rng.randint(10, 24)),
        lambda: f"{word}-{rng.choice(['staple', 'battery', 'horse'])}-{rng.randint(10, 99)}",
        lambda: f"P@ss{rng.choice('w')}0rd{rng.randint(1, 999)}",
    ]
    return rng.choice(forms)()


def with_luhn(rng: random.Random, prefix: str, length: int) -> str:
    body = prefix + some(rng, string.digits, length - len(prefix) - 1)
    total = sum(sum(divmod(int(d) * (2 if i % 2 == 0 else 1), 10)) for i, d in enumerate(reversed(body)))
    return body + str(-total % 10)


def card(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        number = with_luhn(rng, "4" + some(rng, string.digits, 3), 16)
    elif kind == 1:
        number = with_luhn(rng, rng.choice(["51", "53", "55", "2221", "2720"]), 16)
    elif kind == 2:
        number = with_luhn(rng, rng.choice(["34", "37"]), 15)
        return rng.choice(
            [number, f"{number[:4]} {number[4:10]} {number[10:]}", f"{number[:4]}-{number[4:10]}-{number[10:]}"]
        )
    else:
        number = with_luhn(rng, rng.choice(["6011", "65"]), 16)
    return rng.choice(
        [
            number,
            " ".join(number[i : i + 4] for i in range(0, 16, 4)),
            "-".join(number[i : i + 4] for i in range(0, 16, 4)),
        ]
    )


IBANS = {
    "DE": (22, 0),
    "GB": (22, 4),
    "FR": (27, 0),
    "NL": (18, 4),
    "ES": (24, 0),
    "CH": (21, 0),
    "AT": (20, 0),
    "PL": (28, 0),
    "NO": (15, 0),
    "IE": (22, 4),
}


def iban(rng: random.Random) -> str:
    country, (length, letters) = rng.choice(list(IBANS.items()))
    account = some(rng, string.ascii_uppercase, letters) + some(rng, string.digits, length - 4 - letters)
    number = int("".join(str(int(c, 36)) for c in account + country + "00"))
    code = f"{country}{98 - number % 97:02}{account}"
    return rng.choice([code, " ".join(code[i : i + 4] for i in range(0, length, 4))])


def ipv6(rng: random.Random) -> str:
    groups = [f"{rng.randrange(65536):x}" for _ in range(8)]
    groups[0] = rng.choice(["2001", "2a02", "fe80", "fd12", "2606"])
    short = ":".join(groups[:3]) + "::" + ":".join(groups[6:])
    return rng.choice(
        [":".join(groups), ":".join(f"{int(g, 16):04x}" for g in groups), short, f"{groups[0]}:db8::{groups[5]}"]
    )


def phone(rng: random.Random) -> str:
    digits = some(rng, "23456789", 10)
    return rng.choice(
        [
            f"+44 20 {digits[:4]} {digits[4:8]}", f"+49 {digits[:3]} {digits[3:10]}", f"+33 {digits[0]} {digits[1:3]} {digits[3:5]} {digits[5:7]} {digits[7:9]}",
            f"+91-{digits[:5]}-{digits[5:]}", f"+81-3-{digits[:4]}-{digits[4:8]}", f"+49 (0)30 {digits[:7]}", f"0044 20 {digits[:4]} {digits[4:8]}",
            f"+61 4{digits[:2]} {digits[2:5]} {digits[5:8]}", f"+55 (11) 9{digits[:4]}-{digits[4:8]}", f"+41 44 {digits[:3]} {digits[3:5]} {digits[5:7]}", f"+86 138 {digits[:4]} {digits[4:8]}",
        ]
    )  # fmt: skip


def ssn(rng: random.Random) -> str:
    return f"{rng.randint(1, 665):03}-{rng.randint(1, 99):02}-{rng.randint(1, 9999):04}"


def jwt(rng: random.Random) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part({'sub': some(rng, string.digits, 10), 'iat': rng.randrange(2**30)})}.{some(rng, URL_SAFE, 43)}"


KEYS: dict[str, Callable[[random.Random], str]] = {
    "github": lambda r: r.choice(["ghp_", "gho_", "ghu_", "ghs_", "ghr_"]) + some(r, ALNUM, 36),
    "github_fine_grained": lambda r: f"github_pat_{some(r, ALNUM, 22)}_{some(r, ALNUM, 59)}",
    "gitlab": lambda r: r.choice(["glpat-", "gldt-", "glrt-", "glptt-"]) + some(r, URL_SAFE, 20),
    "openai_project": lambda r: r.choice(["sk-proj-", "sk-svcacct-", "sk-admin-"]) + some(r, URL_SAFE, r.choice([48, 74, 120])),
    "openai": lambda r: f"sk-{some(r, ALNUM, 20)}T3BlbkFJ{some(r, ALNUM, 20)}",
    "anthropic": lambda r: f"sk-ant-{r.choice(['api03', 'admin01'])}-{some(r, URL_SAFE, 93)}AA",
    "stripe": lambda r: r.choice(["sk_live_", "sk_test_", "rk_live_"]) + some(r, ALNUM, r.choice([24, 99])),
    "stripe_webhook": lambda r: "whsec_" + some(r, ALNUM, 32),
    "google": lambda r: "AIza" + some(r, URL_SAFE, 35),
    "google_oauth": lambda r: r.choice(["GOCSPX-" + some(r, URL_SAFE, 28), "ya29." + some(r, URL_SAFE, 100)]),
    "slack": lambda r: f"xoxb-{some(r, string.digits, 12)}-{some(r, string.digits, 13)}-{some(r, ALNUM, 24)}",
    "slack_app": lambda r: f"xapp-1-A{some(r, UPPER, 10)}-{some(r, string.digits, 13)}-{some(r, HEX, 64)}",
    "npm": lambda r: "npm_" + some(r, ALNUM, 36),
    "pypi": lambda r: "pypi-AgEIcHlwaS5vcmc" + some(r, URL_SAFE, r.choice([60, 130])),
    "hugging_face": lambda r: "hf_" + some(r, string.ascii_letters, 34),
    "sendgrid": lambda r: f"SG.{some(r, URL_SAFE, 22)}.{some(r, URL_SAFE, 43)}",
    "vault": lambda r: r.choice(["hvs.", "hvb."]) + some(r, URL_SAFE, r.choice([24, 95])),
    "digitalocean": lambda r: r.choice(["dop_v1_", "doo_v1_", "dor_v1_"]) + some(r, HEX, 64),
    "databricks": lambda r: "dapi" + some(r, HEX, 32),
    "telegram": lambda r: f"{some(r, '123456789', 10)}:AA{some(r, URL_SAFE, 33)}",
    "aws_id": lambda r: r.choice(["AKIA", "ASIA"]) + some(r, string.ascii_uppercase + "234567", 16),
    "jwt": jwt,
}  # fmt: skip
"""Keys that say themselves what they are."""

PLAIN: dict[str, Callable[[random.Random], str]] = {
    "card": card, "iban": iban, "ssn": ssn, "ipv6": ipv6, "phone": phone,
}  # fmt: skip


def bare(rng: random.Random, secret: str) -> tuple[str, str]:
    """Return surroundings that do not say that a secret follows."""
    return rng.choice(
        [
            ("prose", f"I used {secret} for that, and it worked."),
            ("end of prose", f"The value is {secret}."),
            ("log", f"2024-05-01T12:00:00Z INFO client started with {secret} (pid 12)"),
            ("json", json.dumps({"note": secret, "n": 1})),
            ("json in json", json.dumps({"output": json.dumps({"x": secret})})),
            ("table", f"| name | value |\n|---|---|\n| a | {secret} |"),
            ("yaml", f"items:\n  - {secret}\n  - b"),
            ("python", f'client = Client("{secret}", timeout=5)'),
            ("shell", f"./run.sh '{secret}' && echo done"),
            ("brackets", f"[{secret}]"),
            ("csv", f"1,{secret},x"),
            ("new line in json", json.dumps(f"line\n{secret}\nline")),
            ("tool output", f"stdout:\n{secret}\nexit code 0"),
            ("query", f"https://api.example.org/v1?value={secret}&n=1"),
            ("parenthesis", f"it failed ({secret}) again"),
        ]
    )


NAMES = [
    "DB_PASSWORD", "POSTGRES_PASSWORD", "MYSQL_ROOT_PASSWORD", "REDIS_PASSWORD", "SMTP_PASS", "PGPASSWORD", "ADMIN_PASSWD", "db_password", "dbPassword", "userPassword", "password", "passwd",
    "pwd", "passphrase", "ssh_passphrase", "SECRET_KEY", "DJANGO_SECRET_KEY", "client_secret", "clientSecret", "CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "JWT_SECRET", "api_key", "apiKey",
    "API_KEY", "X_API_KEY", "OPENWEATHER_API_KEY", "access_token", "accessToken", "ACCESS_TOKEN", "refresh_token", "refreshToken", "auth_token", "AUTH_TOKEN", "BOT_TOKEN", "private_key", "encryption_key",
    "ENCRYPTION_KEY", "signing_key", "SIGNING_SECRET", "webhook_secret", "account_key", "AccountKey", "SharedAccessKey", "session_token", "AWS_SESSION_TOKEN", "app_secret", "consumerSecret", "masterKey",
    "spring.datasource.password", "db-password", "api-key", "client-secret", "DB_PASSWORD_PROD", "API_KEY_2", "password_confirmation", "credentials", "Password", "rootPassword",
]  # fmt: skip


def value_for(rng: random.Random, name: str) -> str:
    """Return what such a name would hold."""
    if "pass" in name.lower() or "pwd" in name.lower():
        return password(rng)
    return rng.choice(
        [
            some(rng, ALNUM, rng.choice([16, 20, 32, 40])),
            some(rng, HEX, rng.choice([32, 40, 64])),
            base64.b64encode(rng.randbytes(rng.choice([24, 32]))).decode(),
        ]
    )


def is_word(name: str) -> bool:
    return name.replace("_", "").isalnum()


def assigned(rng: random.Random) -> tuple[str, str, str]:
    """Return surroundings that name the secret, their name, and the secret."""
    name = rng.choice(NAMES)
    secret = value_for(rng, name)
    upper = name.upper().replace("-", "_").replace(".", "_")
    snake = name.lower().replace("-", "_").replace(".", "_")
    dashed = snake.replace("_", "-")
    plain = secret if not set(secret) & set("!#^*?~&%") else some(rng, ALNUM, 14)
    forms: list[tuple[str, str, str]] = [
        ("env file", secret, f"DEBUG=1\n{upper}={secret}\nPORT=80"),
        ("env file, quoted", secret, f'{upper}="{secret}"'),
        ("shell export", plain, f"export {upper}={plain} && ./run.sh"),
        ("shell prefix", plain, f"{upper}={plain} python main.py"),
        ("shell, single quotes", secret, f"$ export {upper}='{secret}'"),
        ("docker -e", plain, f"docker run -e {upper}={plain} -p 80:80 image"),
        ("docker compose", secret, f"    environment:\n      {upper}: {secret}\n      PORT: 80"),
        ("docker compose list", plain, f"    environment:\n      - {upper}={plain}\n"),
        ("dockerfile", plain, f"FROM x\nENV {upper} {some(rng, ALNUM, 12)}\n".replace(f"{upper} ", f"{upper}={plain} # ")),
        ("yaml", secret, f"database:\n  user: app\n  {name}: {secret}\n  port: 5432"),
        ("yaml, quoted", secret, f'  {name}: "{secret}"'),
        ("yaml, name and value", secret, f"env:\n  - name: {upper}\n    value: {secret}\n"),
        ("yaml, name and quoted value", secret, f'- name: {upper}\n  value: "{secret}"'),
        ("yaml, one line", plain, f"{{name: {upper}, value: {plain}}}"),
        ("json", secret, json.dumps({"user": "app", name: secret})),
        ("json, indented", secret, json.dumps({"user": "app", name: secret}, indent=2)),
        ("json, tight", secret, json.dumps({"user": "app", name: secret, "n": 1}, separators=(",", ":"))),
        ("json, name and value", secret, json.dumps([{"name": upper, "value": secret}])),
        ("json, key and value", secret, json.dumps({"key": name, "value": secret})),
        ("json in json", secret, json.dumps({"result": json.dumps({name: secret})})),
        ("json in json in json", secret, json.dumps({"x": json.dumps({"y": json.dumps({name: secret})})})),
        ("new lines in json", plain, json.dumps({"stdout": f"PORT=80\n{upper}={plain}\nDEBUG=1"})),
        ("python", secret, f'{snake} = "{secret}"'),
        ("python, single quotes", secret, f"{snake}='{secret}'"),
        ("python, typed", secret, f'{snake}: str = "{secret}"'),
        ("python, keyword", secret, f'connect(host="h", {snake}="{secret}", port=1)'),
        ("python, dict", secret, f"{{'user': 'app', '{name}': '{secret}'}}"),
        ("python, environ", secret, f'os.environ["{upper}"] = "{secret}"'),
        ("python, getenv", secret, f'os.getenv("{upper}", "{secret}")'),
        ("javascript", secret, f"const {name if is_word(name) else snake} = '{secret}';"),
        ("javascript, object", secret, f"{{ {name if is_word(name) else snake}: '{secret}', port: 1 }}"),
        ("javascript, env", secret, f"process.env.{upper} = '{secret}'"),
        ("go", secret, f'{snake} := "{secret}"'),
        ("ruby", secret, f":{snake} => '{secret}'"),
        ("php", secret, f"'{name}' => '{secret}',"),
        ("java", secret, f'String {name if is_word(name) else snake} = "{secret}";'),
        ("java properties", secret, f"db.user=app\n{name}={secret}\n"),
        ("ini", secret, f"[db]\nuser = app\n{name} = {secret}\n"),
        ("toml", secret, f'[db]\n{snake} = "{secret}"'),
        ("terraform", secret, f'resource "x" "y" {{\n  {snake} = "{secret}"\n}}'),
        ("terraform variable", secret, f'variable "{snake}" {{\n  type    = string\n  default = "{secret}"\n}}'),
        ("xml", plain, f"<config><{name}>{plain}</{name}></config>"),
        ("xml attribute", plain, f'<add key="{name}" value="{plain}" />'),
        ("flag", plain, f"./tool --{dashed} {plain} --verbose"),
        ("flag with =", plain, f"./tool --{dashed}={plain} --verbose"),
        ("flag, quoted", secret, f"./tool --{dashed} '{secret}'"),
        ("argv", secret, json.dumps(["tool", f"--{dashed}", secret])),
        ("log", plain, f"2024-05-01 12:00:00 DEBUG config: host=db {snake}={plain} port=5432"),
        ("log, colon", plain, f"INFO [main] {name}: {plain}"),
        ("query", plain, f"https://h.example.org/cb?a=1&{snake}={plain}&b=2"),
        ("form, encoded", plain, f"user=app&{snake}={quote(plain, safe='')}&x=1"),
        ("encoded twice", plain, f"redirect=https%3A%2F%2Fh%2F%3F{snake}%3D{plain}%26b%3D2"),
        ("odbc", plain, f"Server=h;Database=d;User Id=sa;{name if '.' not in name else 'Password'}={plain};Encrypt=yes"),
        ("k8s secret", secret, f"kind: Secret\nstringData:\n  {name}: {secret}\n"),
        ("kubectl", plain, f"kubectl create secret generic s --from-literal={name}={plain}"),
        ("helm", plain, f"helm install x y --set auth.{name}={plain}"),
        ("table", plain, f"| {upper} | {plain} |"),
        ("aligned spaces", plain, f"{upper}          {plain}"),
        ("spaces around =", secret, f"{name}   =   {secret}"),
        ("header", plain, f"X-{dashed.title()}: {plain}"),
        ("markdown", plain, f"- `{upper}`: `{plain}`"),
        ("markdown, bold", plain, f"**{name}:** {plain}"),
        ("prose with =", plain, f"I set {upper}={plain}, then restarted."),
        ("powershell", secret, f"$env:{upper} = '{secret}'"),
        ("windows set", plain, f"set {upper}={plain}"),
        ("full width", plain, f"{upper}\uff1d{plain}"),
        ("full-width name", plain, "".join(chr(ord(c) + 0xFEE0) if c.isalnum() else c for c in upper) + f"={plain}"),
        ("zero width", plain, f"{upper[:3]}\u200b{upper[3:]}={plain}"),
        ("smart quotes", secret, f"{snake}: \u201c{secret}\u201d"),
        ("no-break spaces", plain, f"{snake}\u00a0=\u00a0{plain}"),
    ]  # fmt: skip
    where, drawn, text = rng.choice(forms)
    return where, drawn, text


def special(rng: random.Random) -> tuple[str, str, str]:
    """Return a kind, the secret, and a text in which only such a secret stands."""
    secret = password(rng)
    plain = secret if not set(secret) & set("!#^*?~&%@=+") else some(rng, ALNUM, 12)
    token = some(rng, ALNUM, 32)
    basic = base64.b64encode(f"admin:{secret}".encode()).decode()
    pem = base64.b64encode(rng.randbytes(rng.choice([48, 160, 600]))).decode()
    lines = "\n".join(pem[i : i + 64] for i in range(0, len(pem), 64))
    label = rng.choice(["RSA ", "EC ", "OPENSSH ", "", "ENCRYPTED ", "DSA "])
    block = f"-----BEGIN {label}PRIVATE KEY-----\n{lines}\n-----END {label}PRIVATE KEY-----"
    sas = quote(base64.b64encode(rng.randbytes(32)).decode(), safe="")
    forms: list[tuple[str, str, str]] = [
        ("bearer", token, f"Authorization: bearer {token}"), ("bearer", token, f"-H 'authorization: Bearer {token}'"), ("bearer", token, json.dumps({"Authorization": f"Bearer {token}"})),
        ("bearer", token, f'headers = {{"authorization": "bearer {token}"}}'), ("bearer", token, json.dumps(json.dumps({"headers": {"Authorization": f"BEARER {token}"}}))),
        ("bearer", token, f"the request had bearer {token} in it"), ("token scheme", token, f"Authorization: Token {token}"), ("raw authorization", token, f"Authorization: {token}"),
        ("basic", basic, f"Authorization: Basic {basic}"), ("basic", basic, f"curl -H 'authorization: basic {basic}' https://h"), ("basic", basic, json.dumps({"Authorization": f"Basic {basic}"})),
        ("basic", basic, f"Proxy-Authorization: Basic {basic}"), ("docker config", basic, json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": basic}}})),
        ("x-api-key", token, f"x-api-key: {token}"), ("x-api-key", token, f"curl -H 'X-API-Key: {token}' https://h"), ("x-api-key", token, json.dumps({"x-api-key": token})), ("x-api-key", token, f'.header("x-api-key", "{token}")'),
        ("private token", token, f"PRIVATE-TOKEN: {token}"), ("vault token", token, f"X-Vault-Token: {token}"), ("subscription key", token, f"Ocp-Apim-Subscription-Key: {token}"),
        ("cookie", token, f"Cookie: session={token}; theme=dark"), ("cookie", token, f"cookie: theme=dark; sid={token}"), ("cookie", token, f"Set-Cookie: sessionid={token}; Path=/; HttpOnly"), ("cookie", token, json.dumps({"Cookie": f"a=b; JSESSIONID={token}"})),
        ("cookie", token, f"curl -b 'sid={token}' https://h"), ("cookie", token, f"curl --cookie \"PHPSESSID={token}\" https://h"), ("cookie", token, f"< set-cookie: connect.sid={token}; Secure"),
        ("private key", lines[:40], block), ("private key", pem[:40], block.replace("\n", "\\n")), ("private key", pem[-40:], json.dumps({"private_key": block})), ("private key", lines[-30:], block.replace("\n", "\n    ")),
        ("private key", pem[:60], f"-----BEGIN {label}PRIVATE KEY-----\n{lines[:200]}"), ("private key", pem[:40], json.dumps(json.dumps({"k": block}))), ("pgp", lines[:40], f"-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: x\n\n{lines}\n-----END PGP PRIVATE KEY BLOCK-----"),
        ("private key", pem[:40], f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{some(rng, HEX, 32).upper()}\n\n{lines}\n-----END RSA PRIVATE KEY-----"),
        ("mysql -p", plain, f"mysql -u root -p{plain} -h db app"), ("mysql -p", secret, f"mysql -h db -u root -p'{secret}' -e 'SHOW TABLES'"), ("mysqldump -p", plain, f"$ mysqldump --single-transaction -uroot -p{plain} app > a.sql"),
        ("sshpass", plain, f"sshpass -p {plain} ssh u@h"), ("sshpass", secret, f"sshpass -p '{secret}' scp a u@h:"), ("redis-cli", plain, f"redis-cli -h h -a {plain} ping"), ("docker login", plain, f"docker login -u user -p {plain} registry.example.org"),
        ("curl -u", plain, f"curl -u admin:{plain} https://h/api"), ("curl -u", secret, f"curl -s -u 'admin:{secret}' https://h/api"), ("curl -u", plain, f"curl --user admin:{plain} -X POST https://h"), ("curl -u", plain, f'curl -X GET "https://h" -u "elastic:{plain}"'), ("curl -u", plain, f"curl -uadmin:{plain} https://h"),
        ("--password", plain, f"tool login --username u --password {plain}"), ("--password", plain, f"tool --password={plain}"), ("--password", secret, f"tool --password '{secret}'"), ("--password", secret, json.dumps(["tool", "--password", secret])),
        ("wget", plain, f"wget --http-user=u --http-password={plain} https://h"), ("openssl", plain, f"openssl enc -aes-256-cbc -k {plain} -in a"), ("openssl", plain, f"openssl rsa -in k.pem -passin pass:{plain}"), ("ldap", plain, f"ldapsearch -D cn=admin -w {plain} -b dc=x"),
        ("mongo", plain, f"mongosh --host h -u admin -p {plain} --authenticationDatabase admin"), ("smb", plain, f"smbclient //h/s -U user%{plain}"), ("zip", plain, f"unzip -P {plain} a.zip"),
        ("aws configure", token, f"aws configure set aws_secret_access_key {token}"), ("psql", plain, f"PGPASSWORD={plain} psql -h db -U app"),
        ("signed url", some(rng, HEX, 64), ""), ("s3 credential", some(rng, HEX, 64), ""),
        ("sas", sas, f"https://a.blob.core.windows.net/c/b?sv=2022-11-02&st=2024-01-01&se=2025-01-01&sr=b&sp=r&sig={sas}"), ("gcs", some(rng, HEX, 128), ""),
        ("cloudfront", token, f"https://d1.cloudfront.net/a?Expires=1700000000&Signature={token}~&Key-Pair-Id=K2JCJMDEHXQW5F"),
        ("account key", base64.b64encode(rng.randbytes(64)).decode(), ""), ("service bus", base64.b64encode(rng.randbytes(32)).decode(), ""),
        ("slack hook", f"T{some(rng, UPPER, 8)}/B{some(rng, UPPER, 8)}/{some(rng, ALNUM, 24)}", ""), ("discord hook", some(rng, URL_SAFE, 68), ""), ("teams hook", some(rng, HEX, 32), ""), ("zapier hook", some(rng, string.digits, 7) + "/" + some(rng, string.ascii_lowercase + string.digits, 7), ""),
        ("url password", plain, f"https://u:{plain}@localhost/x"), ("url password", plain, f"git clone https://oauth2:{plain}@git.example.org/a.git"), ("url password", plain, f"ftp://user:{plain}@10.0.0.5:21/"), ("url password", plain, f"redis://:{plain}@cache:6379/0"),
        ("url password", plain, f"postgresql+asyncpg://app:{plain}@db:5432/app"), ("url password", plain, f"mssql+pyodbc://sa:{plain}@db/app"), ("url password", quote(secret, safe=""), f"http://admin:{quote(secret, safe='')}@localhost:8080"), ("url password", plain, f"smtp://u:{plain}@mail:587"), ("url password", plain, f"amqp+ssl://u:{plain}@mq/"), ("url token", token, f"https://{token}@git.example.org/a/b.git"),
        ("url password, encoded", plain, f"url=https%3A%2F%2Fu%3A{plain}%40localhost%2Fx"),
        ("netrc", plain, f"machine h.example.org login u password {plain}"), ("netrc", plain, f"machine h\n  login u\n  password {plain}\n"), ("pgpass", plain, f"db.example.org:5432:app:app_user:{plain}"), ("pgpass", plain, f"# comment\n*:*:*:postgres:{plain}\n"),
        ("npmrc", token, f"//registry.example.org/:_authToken={token}"), ("pypirc", plain, f"[pypi]\nusername = __token__\npassword = {plain}"),
        ("sql", secret, f"CREATE USER app WITH PASSWORD '{secret}';"), ("sql", secret, f"ALTER USER root IDENTIFIED BY '{secret}';"), ("jdbc", plain, f"jdbc:mysql://h/db?user=u&password={plain}"), ("odbc", plain, f"Driver={{x}};Server=h;UID=sa;PWD={plain};"),
        ("login prompt", plain, f"Username: app\nPassword: {plain}\nLogin succeeded"), ("jwk", some(rng, URL_SAFE, 43), ""), ("passphrase", "correct horse battery staple", 'passphrase: "correct horse battery staple"'), ("passphrase", "correct horse battery staple", "passphrase: correct horse battery staple\n"),
        ("telegram url", some(rng, URL_SAFE, 33), ""), ("spoken ssn", f"{ssn(rng).replace('-', '')}", ""), ("ssh key in base64", base64.b64encode(block.encode()).decode(), ""),
    ]  # fmt: skip
    kind, drawn, text = rng.choice(forms)
    if not text:
        text = {
            "signed url": f"https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20240101T000000Z&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature={drawn}",
            "s3 credential": f"Authorization: AWS4-HMAC-SHA256 Credential=AKIA{some(rng, UPPER, 16)}/20240101/us-east-1/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature={drawn}",
            "gcs": f"https://storage.googleapis.com/b/o?X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Signature={drawn}&x=1",
            "account key": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={drawn};EndpointSuffix=core.windows.net",
            "service bus": f"Endpoint=sb://n.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={drawn}",
            "slack hook": f"curl -X POST https://hooks.slack.com/services/{drawn} -d '{{}}'",
            "discord hook": f"https://discord.com/api/webhooks/{some(rng, '123456789', 18)}/{drawn}",
            "teams hook": f"https://t.webhook.office.com/webhookb2/0a1b2c3d-1111-2222-3333-444455556666@0a1b2c3d-1111-2222-3333-444455556666/IncomingWebhook/{drawn}/0a1b2c3d-1111-2222-3333-444455556666",
            "zapier hook": f"POST https://hooks.zapier.com/hooks/catch/{drawn}/",
            "jwk": json.dumps({"kty": "EC", "crv": "P-256", "x": some(rng, URL_SAFE, 43), "d": drawn}),
            "telegram url": f"https://api.telegram.org/bot{some(rng, '123456789', 9)}:AA{drawn}/sendMessage",
            "spoken ssn": f"Customer SSN: {drawn}, born 1980",
            "ssh key in base64": f"tls.key: {drawn}",
        }[kind]
    return kind, drawn, text


def disguised(rng: random.Random, secret: str) -> str:
    """Return a secret with zero-width characters in it, or in full-width ones."""
    kind = rng.randrange(3)
    if kind == 0:
        place = rng.randint(1, len(secret) - 1)
        return secret[:place] + rng.choice("\u200b\u200c\u200d\u2060\ufeff\u00ad") + secret[place:]
    if kind == 1:
        return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in secret)
    return "\u200b".join(secret)


def made(rng: random.Random) -> Made:
    """Draw a secret in its surroundings."""
    kind = rng.randrange(10)
    if kind < 4:
        where, secret, text = assigned(rng)
        return Made("assigned", where, secret, text)
    if kind < 7:
        where, secret, text = special(rng)
        return Made(where, where, secret, text)
    kinds = KEYS if kind < 9 else PLAIN
    name = rng.choice(list(kinds))
    secret = kinds[name](rng)
    if rng.random() < 0.12:
        secret = disguised(rng, secret)
    where, text = bare(rng, secret)
    if where in ("json", "json in json", "new line in json"):
        escaped = json.dumps(secret)[1:-1]
        secret = json.dumps(escaped)[1:-1] if where == "json in json" else escaped
    return Made(name, where, secret, text)


HARMLESS: list[str] = [case["text"] for case in read_jsonl("redaction_harmless.jsonl")]
"""What looks like a secret and is none: ids, hashes, versions, numbers, code, placeholders and prose."""
