"""Secrets in requests, such as headers, cookies and URLs, and in commands, statements and calls.

Those of commands are values of options, or arguments at positions that hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from worker.redact.forms import decoded, end_of
from worker.redact.markers import Found, Rule, rule
from worker.redact.names import (
    IF_RANDOM,
    PLACEHOLDER,
    PROSE,
    harmless,
    has_digit,
    is_given,
    is_random,
    is_typed,
    is_value,
    looks_secret,
    strength_of,
)  # fmt: skip

# -- requests

_QUOTES: Final = r"""(?:\\{0,7}["'`])?"""

_AUTHORIZATION: Final = re.compile(
    rf"(?=[Aa])(?i:authorization){_QUOTES}[\])]?\s{{0,8}}(?:[:=,]|=>)\s{{0,8}}{_QUOTES}(?![\"'\[<${{%])(?:f[\"'])?"
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9-]{1,24})(?:[ \t:=]|%20){1,4}(?![<${%\[]))?"
    r"(?P<value>[^\s\"'`<>\\,;(){}\[\]]{6,8192}+)"
)
_SCHEMES: Final = frozenset(
    ("basic", "bearer", "token", "apikey", "api-key", "key", "negotiate", "ntlm", "sharedkey", "sharedkeylite", "bot")
) | {"splunk", "snowflake", "genie", "sso-key", "pat", "jwt", "klaviyo-api-key", "deepl-auth-key", "discogs", "secret"}
_PARTED_SCHEMES: Final = ("aws4", "digest", "oauth", "hmac")
_END_OF_HEADER: Final = re.compile(r"[\n'`]|\\n")
_AUTH_PART: Final = re.compile(
    r"(?=[SROCNMHsrocnmh])(?i:signature|response|oauth_token|oauth_consumer_key|oauth_signature|credential|nonce|mac|hmac)"
    r"=\\{0,3}\"?([^\s\",;\\]{6,1024})"
)


def _authorizations(text: str, _lowered: str) -> Iterator[Found]:
    """Find the secrets of `Authorization` headers, with any scheme."""
    done = 0
    for match in _AUTHORIZATION.finditer(text):
        value, scheme = match["value"], (match["scheme"] or "").lower()
        start, end = match.span("value")
        if not scheme:
            if looks_secret(value):
                yield Found(start, end, "bearer_token")
        elif scheme.startswith(_PARTED_SCHEMES):
            line_end = _END_OF_HEADER.search(text, max(end, done), start + 4096)
            until = line_end.start() if line_end else start + 4096
            for part in _AUTH_PART.finditer(text, max(start, done), until):
                yield Found(part.start(1), part.end(1), "basic_auth")
            done = max(done, until)
        elif (scheme in _SCHEMES and not harmless(value)) or looks_secret(value):
            yield Found(start, end, "basic_auth" if scheme == "basic" else "bearer_token")


_COOKIES_NAME: Final = re.compile(r"cookies[\"']?\s{0,4}[:=]")
_LISTED_COOKIE: Final = re.compile(
    rf"name{_QUOTES}\s{{0,4}}[:=]\s{{0,4}}{_QUOTES}[^\s\"'`\\]{{1,100}}+{_QUOTES},\s{{0,20}}{_QUOTES}value{_QUOTES}\s{{0,4}}[:=]"
    rf"\s{{0,4}}{_QUOTES}(?P<secret>[^\s\"'`\\]{{16,4096}}+)"
)
_MOST_LISTED: Final = 20_000


def _listed_cookies(text: str, _lowered: str) -> Iterator[Found]:
    """Find cookies in a list, as browser tools write them: "cookies": [{"name": "sid", "value": "x"}]."""
    done = 0
    for begin in _COOKIES_NAME.finditer(text):
        end = begin.end() + _MOST_LISTED
        for match in _LISTED_COOKIE.finditer(text, max(begin.end(), done), end):
            if is_random(match["secret"]):
                yield Found(*match.span("secret"), "cookie")
        done = max(done, end)


def _is_basic(secret: str) -> bool:
    read = decoded(secret.replace("-", "+").replace("_", "/"))
    return read is not None and b":" in read and all(32 <= byte < 127 or byte >= 0xC3 for byte in read)


_PART: Final = re.compile(
    r"form-data;[^\n\"]{0,40}name=\\{0,7}\"(?P<name>[^\"\\\n]{1,80})\\{0,7}\"[^\n]{0,120}[\r\n]{1,4}"
    r"(?:[A-Za-z-]{1,30}:[^\r\n]{0,200}[\r\n]{1,4}){0,4}?[\r\n]{1,4}(?P<secret>[^\r\n]{1,4000}+)"
)


def _parts(text: str, _lowered: str) -> Iterator[Found]:
    for match in _PART.finditer(text):
        strength = strength_of(match["name"])
        if strength > IF_RANDOM and is_given(match["secret"], strength):
            yield Found(*match.span("secret"), "password")


_SIGNED: Final = re.compile(
    r"(?:[?&;]|%3F|%26|\\u0026)(?:amp;)?(?P<name>(?i:x-(?:amz|goog|oss|cos|obs|ms)-(?:signature|credential"
    r"|security-token)|signature|sig|policy|key-pair-id|awsaccesskeyid|googleaccessid|ossaccesskeyid"
    r"|(?:access_|id_|refresh_|auth_|api_)?token|api_?key|appid|key|auth|code|client_secret|hmac|hdnts|verify|secret"
    r"|password|passwd|pwd|sessionid|session|sid|jwt|ticket|sas))"
    r"(?:=|%3D)(?P<value>[^\s&\"'`<>\\;,)\]}\[#]{6,4096}+)"
)
_SIGNATURES: Final = frozenset(
    {"signature", "sig", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid", "hmac", "hdnts"}
)


def _signed_urls(text: str, _lowered: str) -> Iterator[Found]:
    for match in _SIGNED.finditer(text):
        name, value = match["name"].lower(), match["value"]
        sure = name.startswith("x-") or (name in _SIGNATURES and len(value) >= 16)
        if (sure and not PLACEHOLDER.fullmatch(value)) or looks_secret(value):
            yield Found(*match.span("value"), "signed_url")


_COOKIES: Final = r"(?=[A-Za-z0-9_.%$-]{1,100}=)"
_USER_INFO: Final = r"://[^\s/]+(?:@|\[redacted:email\])"

REQUESTS: Final = (
    rule("password", _USER_INFO,
        r"://[^\s/?#@:\"'`<>\\]{0,100}+:"
        r"(?P<secret>[^\s@/\"'`<>\\]{1,300}+(?:@[^\s@/\"'`<>\\]{1,100}+(?=@))*+)(?:@|(?=\[REDACTED:email\]))",
        lambda secret: not PLACEHOLDER.fullmatch(secret)),
    rule("password", _USER_INFO, r"://(?P<secret>[A-Za-z0-9_.~%-]{16,300}+)(?:@|(?=\[REDACTED:email\]))", is_random),
    rule("password", "%3a%2f%2f",
        r"%3A%2F%2F[A-Za-z0-9_.-]{0,100}+%3A"
        r"(?P<secret>(?:[^\s%&\"'`<>\\]|%(?!40|2F)[0-9A-Fa-f]{2}){1,300}+)%40"),
    Rule(r"(?:[?&;]|%3f|%26|u0026)(?:amp;)?(?:x-[a-z-]+|[a-z_]*(?:signature|sig|policy|id|token|key|auth|code|secret|hmac"
        r"|hdnts|verify|password|passwd|pwd|session|sid|jwt|ticket|sas))(?:=|%3d)", _signed_urls),
    Rule("authorization", _authorizations),
    rule("bearer_token", "bearer[^a-z0-9]+[a-z0-9_.~+/-]{12}",
        r"(?=[Bb])(?i:bearer)(?:,?\s{1,4}|%20|\+|[:=]\s{0,2})"
        r"(?P<secret>[A-Za-z0-9_.~+/-]{12,8192}+=*+)", has_digit),
    rule("basic_auth", "basic[^a-z0-9]",
        r"(?=[Bb])(?i:basic)(?:\s{1,4}|%20)(?P<secret>[A-Za-z0-9+/_-]{6,2048}+={0,2}+)", _is_basic),
    rule("cookie", "set-cookie",
        rf"(?=[Ss])(?i:set-cookie){_QUOTES}[\])]?\s{{0,4}}[:=,]\s{{0,4}}{_QUOTES}{_COOKIES}"
        r"(?P<secret>[^\r\n\"'\\;]{3,8192}+)"),
    rule("cookie", "cookie",
        rf"(?=[Cc])(?<![Ss][Ee][Tt]-)(?i:cookie){_QUOTES}[\])]?\s{{0,4}}[:=,]\s{{0,4}}{_QUOTES}{_COOKIES}"
        r"(?P<secret>[^\r\n\"'\\]{3,8192}+)"),
    # a cookie file, such as curl's
    rule("cookie", r"\ttrue\t|\tfalse\t",
        r"\t(?:TRUE|FALSE)\t/[^\s]{0,100}+\t(?:TRUE|FALSE)\t[0-9]{1,12}+\t[^\s]{1,100}+\t(?P<secret>[^\s]{3,4096}+)"),
    rule("cookie", "-b[ =]|--cookie[ =]",
        rf"(?<![A-Za-z0-9-])(?:-b|--cookie)[ =]{{1,3}}[\"']?{_COOKIES}(?P<secret>[^\r\n\"']{{3,8192}}+)"),
    Rule("cookies", _listed_cookies),
    Rule("form-data;", _parts),
    rule("password", "auth |authenticate ",
        r"(?:\bAUTH|\bAUTHENTICATE)[ ](?:PLAIN|LOGIN|XOAUTH2|CRAM-MD5|OAUTHBEARER)\s{1,4}(?:\+\s{1,4})?"
        r"(?P<secret>[A-Za-z0-9+/]{8,2000}+={0,2}+)", lambda secret: len(decoded(secret) or b"") >= 3),
    # the answers to "Username:" and "Password:"
    rule("password", "334 (?:UGFzc3dvcmQ6|VXNlcm5hbWU6)",
        r"334 (?:UGFzc3dvcmQ6|VXNlcm5hbWU6)[\s\"',]{1,12}(?:C: ?|> ?)?(?P<secret>[A-Za-z0-9+/]{4,2000}+={0,2}+)"),
    rule("password", " login ",
        r"(?<![^\s>:])[A-Za-z]{0,4}[0-9]{1,6} LOGIN (?:\"[^\"\n]{1,100}\"|[^\s\"]{1,100}) "
        r"\"?(?P<secret>(?:(?<=\")[^\"\n]|[^\s\"]){1}(?:[^\s\"]|(?<=[^\n\"]) (?=[^\n\"]{0,100}\")){1,200})"),
    rule("password", "auth ",
        r"(?:(?<![A-Za-z-])AUTH|(?<=> )auth|(?<=>)auth|sentinel auth-pass) "
        r"(?:(?!PLAIN|LOGIN|XOAUTH|CRAM|FAILED|ERROR|OK)[\w.-]{1,40} )?[\"']?(?P<secret>[^\s\"'<>\[\]{}()]{6,200})",
        is_typed),
)  # fmt: skip

# -- commands

_ARGUMENT: Final = r"""(?:"([^"\n]{2,300})"|'([^'\n]{2,300})'|((?![-$<{\[*])[^\s"'`;|&<>\\]{2,300}))"""

_WHOLE_COMMAND: Final = re.compile(r"(?:\"[^\"\n]{0,300}+\"|'[^'\n]{0,300}+'|(?!\\n|[|&]{2})[^\n;])*+")
_MOST_COMMAND: Final = 600


def _option_rule(hint: str, command: str, option: str, kind: str = "password") -> Rule:
    """Return the rule for an option within _MOST_COMMAND characters after a command; the secret is its last group."""
    name, with_value = re.compile(command), re.compile(option)

    def find(text: str, _lowered: str) -> Iterator[Found]:
        if not with_value.search(text):
            return
        done = 0
        for match in name.finditer(text):
            if match.start() < done:
                continue
            done = end_of(_WHOLE_COMMAND.match(text, match.end(), match.end() + _MOST_COMMAND))
            for found in with_value.finditer(text, match.end(), done):
                group = found.lastindex or 0
                if not harmless(found[group]):
                    yield Found(*found.span(group), kind)

    return Rule(hint, find)


def _command(hint: str, command: str, option: str) -> Rule:
    return _option_rule(hint, rf"(?<![A-Za-z0-9_])(?:{command})(?![A-Za-z0-9_])", rf"(?<![\w-]){option}{_ARGUMENT}")


_NEXT_ITEM: Final = r"[\"'],\s{0,8}(?=[\"'])"
_SEPARATOR: Final = rf"(?:[ ]{{1,4}}|{_NEXT_ITEM})"
"""Between an option and its value, also in a list of arguments: "-a", "x"."""

_OPTIONS: Final = (
    _command("mysql|maria", "mysql(?:dump|admin|import|show|check|sh)?|mariadb(?:-dump|-admin)?",
        r"-p(?!rint|ath|rune|rotocol|lugin|rofile|ager)"),
    _command("sshpass|7z|rar", "sshpass|7z[ar]?|rar|unrar", f"-p(?:[ ]|{_NEXT_ITEM})?"),
    _command(r"zip[^a-z0-9_\n][^\n]*(?-i:-P)", "zip|unzip", "-P[ ]?"),
    _command("lftp", "lftp", "-u[ ]{1,4}[A-Za-z0-9_.@-]{1,60},"),
    _command("ssh-keygen|keytool", "ssh-keygen|keytool|jarsigner", r"-(?:N|storepass|keypass)" + _SEPARATOR),
    _command("user(?:add|mod)|adduser", "useradd|usermod|adduser", r"-p" + _SEPARATOR),
    _command("secret set", "secret set [A-Za-z0-9_]{1,60}", "(?:-b|--body)[ =]{1,4}"),
    _command("mongo", "mongo(?:sh|dump|restore|import|export)?", r"-p" + _SEPARATOR),
    _command("login", r"[a-z]{2,12}(?: |[\"'], ?[\"'])[a-z -]{0,20}login", r"-p(?:[ ]{1,4}|[\"'],[ ]?(?=[\"']))"),
    _command("rabbit|sqlcmd|bcp|isql|osql|mosquitto|ipmi|cqlsh|nodetool|client|sqlplus|vsql|beeline",
        "rabbitmqadmin|sqlcmd|bcp|[io]sql|mosquitto_(?:pub|sub)|ipmitool|cqlsh|nodetool|clickhouse-client|sqlplus|vsql"
        "|beeline", "-(?:p|P|pw|u)[ ]{1,4}"),
    _command("plink|pscp|psftp|putty", r"(?:plink|pscp|psftp|putty)(?:\.exe)?", r"-pw" + _SEPARATOR),
    _command("redis", "redis-cli", r"-a" + _SEPARATOR),
    _command("ldap", "ldap(?:search|add|modify|delete|whoami|passwd)", "-[wW][ ]{0,4}"),
    _command("htpasswd", "htpasswd", r"-\w{0,5}b\w{0,5}[ ]{1,4}\S{1,200}[ ]{1,4}\S{1,100}" + _SEPARATOR),
    _command("openssl", "openssl", "-(?:pass(?:in|out)?|k|K)[ ]{1,4}(?:pass:)?+"),
    _command("rdesktop|freerdp", "x?freerdp|rdesktop", "/p:"),
    _command("snmp", "snmp[a-z]{1,10}", r"-[AX]" + _SEPARATOR),
    _option_rule(
        r"(?:-[a-z]{0,4}[ua]|--user|--proxy-user|--auth|--creds|--credentials)[ =\\\"',]*[a-z0-9_.@+\\/-]+[:%]",
        r"\b(?:curl|wget|http|https|xh|smbclient|skopeo|rpcclient|svn)(?![A-Za-z0-9_])",
        r"(?<![A-Za-z0-9-])(?:-[a-zA-Z]{0,4}u|-U|-a|--user|--proxy-user|--auth|--creds|--credentials)"
        r"(?:[ =]{0,4}|\\{0,7}[\"'],[ ]{0,4}\\{0,7}[\"'])\\{0,7}[\"']?"
        r"(?:(?<=\")[A-Za-z0-9_.@+\\/-]{1,100}+[:%]((?![/<{\\]|\$[A-Za-z_{(])[^\"\\\n]{3,300}+)(?=\")"
        r"|(?<=')[A-Za-z0-9_.@+\\/-]{1,100}+[:%]((?![/<{\\]|\$[A-Za-z_{(])[^'\\\n]{3,300}+)(?=')"
        r"|[A-Za-z0-9_.@+\\/-]{1,100}+[:%]((?![/<{\\]|\$[A-Za-z_{(])[^\s\"'`\\]{3,300}+))", "basic_auth"),
)  # fmt: skip

_ARGUMENTS: Final = (
    rule("password", "login",
        r"\blogin[\s]{1,20}\S{1,200}[\s]{1,20}(?:account\s{1,20}\S{1,200}\s{1,20})?password[\s]{1,20}"
        r"(?P<secret>\S{1,300})", is_value),
    rule("password", r"requirepass|masterauth|masterpass|bindpw|set password|datasource\.password |sasl_passwd",
        r"(?=[rmsbRMSB])(?i:requirepass|masterauth|masterpass|bindpw|set password|spring\.datasource\.password"
        r"|sasl_passwd)[ \t]{1,8}(?P<secret>[^\s\"'\\]{4,200})", is_value),
    rule("password", r"identified|passw(?:or)?d +\\*['\"]",
        r"(?=[IPip])(?i:identified(?: with [a-z0-9_]{1,40})? by|password|passwd)[ ]{1,4}\\{0,7}(['\"])"
        r"(?P<secret>[^'\"\n\\]{3,200})\\{0,7}\1", is_value),
    rule("password", "echo |printf ",
        r"\b(?:echo|printf)[ ](?:-n |'%s' )?[\"']?(?P<secret>[^\s\"'|$\\]{4,200})[\"']?[ ]?\|[ ]?"
        r"(?:sudo -S|\S{1,40} login|docker login|passwd|chpasswd|openssl)", is_value),
    rule("password", "vault login| config ",
        r"\b(?:vault login|npm config set \S{1,100}|git config \S{0,60}token)[ ](?P<secret>[A-Za-z0-9_.-]{16,200})",
        is_value),
    rule("password", r"password\(|passwd\(|secret\(|token\(|key\(",
        r"(?=[SsWw])(?i:set|with|send)_?(?i:password|passwd|secret|token|api_?key)\(\s{0,8}[\"'](?P<secret>[^\"'\n]{4,200})[\"']",
        is_value),
    rule("password", r"auth\(|auth=\(|auth= \(|credentials\(|getconnection\(",
        r"(?=[AaCcGg])(?i:auth|credentials|getconnection)(?:=\s?)?\((?:[^\"'()\n,]{1,100},)?\s{0,8}"
        r"[\"'][^\"'\n]{1,100}[\"'],\s{0,8}[\"'](?P<secret>[^\"'\n]{4,200})[\"']", is_value),
    rule("password", r"login\(",
        r"(?=[Ll])(?i:login)\(\s{0,8}[\"'][^\"'\n]{1,100}[\"'],\s{0,8}[\"'](?P<secret>[^\"'\n]{4,200})[\"']",
        looks_secret),
    rule("password", r"jwt\.|hmac\.|createhmac\(|sign\(",
        r"(?:jwt\.[a-z]{1,10}|\bsign|createHmac|hmac\.new)\([^\"'()\n,]{0,80},?\s{0,4}b?"
        r"[\"'](?P<secret>[^\"'\s]{12,200})[\"']", is_random),
    rule("password",
        "obscure |add_user |change_password |net us|nmcli |mysqladmin |wpa_passphrase |iwconfig |encrypt_string ",
        r"\b(?:rclone obscure|(?:add_user|change_password|wpa_passphrase) \S{1,100}|(?i:net user) \S{1,60}"
        r"|(?i:net use) [^\n]{0,80}\\\S{1,80}|(?:nmcli|mysqladmin) [^\n]{0,80}password"
        r"|iwconfig \S{1,20} key|encrypt_string)"
        r"[ ][\"']?(?P<secret>(?![/-])[^\s\"']{5,200})", is_value),
    # a user and a password as options of any command
    rule("password", " (?:-u|--user(?:name)?|-ru|/ru)[ =].* (?:-p|-rp|/rp) [^\\s\"'`;|&]{5}",
        r"[ ](?:-u|-U|--user|--username|-ru|/ru)[ =]\S{1,60}[ ](?:[^\n;|&]{0,80}[ ])?(?:-p|-P|-rp|/rp)[ ]"
        r"(?P<secret>[^\s\"'`;|&]{5,100})", looks_secret),
    rule("password", "<<<",
        r"\b(?:sudo|passwd|login|read|kinit|cryptsetup|vncpasswd|secret)\b[^\n<>|;]{0,40}<<<[ ]?[\"']?"
        r"(?P<secret>[^\s\"'$]{5,300})", is_value),
    rule("password", "(?:login|auth init|nuget push) (?:.* )?[a-z0-9_.+-]{16}",
        r"\b(?:login|auth init|nuget push)(?:[ ][^\n;|&]{0,60})?[ ]"
        r"(?P<secret>(?![-])[A-Za-z0-9_.+-]{16,300}+={0,2}+)(?![/@:\w\[])", is_random),
    rule("password", "auth |acl setuser |secret 0 |secret 5 |secret 7 |password 0 |password 7 ",
        r"(?:(?<![^\n])AUTH |\bACL SETUSER [^\n>]{0,60}>|\b(?:secret|password) [057] )(?P<secret>[^\s\"']{6,200})",
        looks_secret),
    rule("password", r"securestring|password\(|pscredential\(",
        r"(?i:ConvertTo-SecureString(?: -String)?[ ]|PASSWORD\(|PSCredential\([^,\n]{1,80},)\s{0,4}"
        r"[\"'](?P<secret>[^\"'\n]{4,200})[\"']", is_value),
    rule("password", "code is |code: |code : |code  ",
        r"(?=[VvOo2SsMm])(?i:verification|otp|one-time|2fa|mfa|security)[ ](?:pass)?code(?:[ ]is|[ ]?:)[ ]{0,4}"
        r"(?P<secret>[0-9]{4,8})(?![0-9])"),
    rule("password", r"@tcp\(|@unix\(|@\[redacted:ip\]",  # user:password@host without a scheme
        r"(?<![A-Za-z0-9_:/@.%-])[A-Za-z0-9_.%-]{1,60}+:(?P<secret>[^\s:@/\"'`<>()]{4,100}+)@(?:tcp\(|unix\(|\[REDACTED:ip\])",
        is_value),
    rule("password",
        "mot de passe|contrase|senha|wachtwoord|hasło|heslo|senord|ifre|ароль|密码|密碼|パスワード|비밀번호",
        r"(?=[MmCcSsWwHhLlŞşПп密パ비])(?:[Mm]ot de passe|[Cc]ontrase[ñn]a|[Ss]enha|[Ww]achtwoord|[Hh]asło|[Hh]eslo"
        r"|[Ll]ösenord|[Şş]ifre|[Пп]ароль|密码|密碼|パスワード|비밀번호)"
        rf"[\"']?[ ]{{0,2}}[:=][ ]{{0,4}}(?!{PROSE})[\"'`]?(?P<secret>[^\s\"'`,;]{{4,200}})", is_value),
    rule("password", "password-command", r"--password-command[ =]\\{0,3}[\"']?echo (?P<secret>[^\s\"'$\\]{4,200})",
        is_value),
    rule("password", "jdbc:oracle|sqlplus |sqlldr |expdp |impdp |rman target",  # Oracle's user/password@host
        r"(?:jdbc:oracle:[a-z0-9]{1,10}:|\b(?:sqlplus|sqlldr|expdp|impdp|rman target)(?: -[A-Za-z]{1,2})?[ ])"
        r"[A-Za-z0-9_$#]{1,60}/(?P<secret>[^\s/\"'`<>]{2,100}?)(?=@|[\s\"'])", is_value),
    rule("password", "setx ",
        r"(?i:setx) (?=\S{0,60}(?:PASS|TOKEN|KEY|SECRET|PWD|CRED))\S{1,80} [\"']?"
        r"(?P<secret>[^\s\"'/%][^\s\"']{3,300})", is_value),
    rule("password", "vault login", r"\bvault login (?:-\S{1,40} ){0,3}(?P<secret>[sh](?:vs)?\.[A-Za-z0-9]{8,200})"),
    rule("password", "password>", r"(?i:password)>[ ]?\n(?P<secret>[^\s]{6,100})(?=\n)", is_typed),
    rule("password", r"pwd=\{|password=\{", r"(?i:pwd|password)=\{(?P<secret>[^{}\s\"'$%]{4,100})\}(?=[;\s\"']|\Z)",
        is_value),
    rule("basic_auth", "(?:-u|--user)[ =]",  # curl -u KEY:
        r"(?<![A-Za-z0-9-])(?:-u|--user)[ =][\"']?(?P<secret>[A-Za-z0-9_.-]{16,200}+):(?=[\s\"']|\Z)", is_random),
    rule("password", r":(?:[0-9]{4,5}|\*):[^\s:]+:",  # .pgpass
        r"(?:^|(?<=\\n)|(?<=[\n\"'`]))[A-Za-z0-9_.*-]{1,100}+:(?:[0-9]{4,5}|\*):[^:\s\"'\\]{1,64}+:[^:\s\"'\\]{1,64}+:"
        r"(?P<secret>[^\s\"'\\]{2,200}+)", is_value),
)  # fmt: skip

COMMANDS: Final = (*_OPTIONS, *_ARGUMENTS)
