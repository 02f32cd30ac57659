"""Values assigned to names: a line for each alternative of the patterns in assigned.py."""

import re

import pytest

from worker.redact.documents import redact_text

NAMES = [
    "DB_PASS=«hunter22»",
    'expect("assword").sendline("«hunter22»")',
    "WIFI_PSK=«hunter22»",
    "WIFI_PSKILL=hunter22",
    "userPwd=«hunter22»",
    "admin_psw=«hunter22»",
    "root_pw=«hunter22»",
    "root_pwx=hunter22",
    "bindpw=«hunter22»",
    "requirepass=«hunter22»",
    "clientSecret=«hunter22»",
    "sess_id=«a1b2C3d4e5f6G7h8i9»",
    "x_signature=«a1b2C3d4e5f6G7h8i9»",
    "sig=«a1b2C3d4e5f6G7h8i9»",
    "signal=a1b2C3d4e5f6G7h8i9",
    "connect.sid=«a1b2C3d4e5f6G7h8i9»",
    "side=a1b2C3d4e5f6G7h8i9",
    "bot_token=«hunter22»",
    "signing_key=«hunter22»",
    "dbCreds=«hunter22»",
    "cvc=«a1b2C3d4e5f6G7h8i9»",
    "cvcs=a1b2C3d4e5f6G7h8i9",
    "oauth=«a1b2C3d4e5f6G7h8i9»",
    "jwt=«a1b2C3d4e5f6G7h8i9»",
    "otp=«a1b2C3d4e5f6G7h8i9»",
    "pin=«a1b2C3d4e5f6G7h8i9»",
    "pincode=«hunter22»",
    "pinger=hunter22",
    "mnemonic=«hunter22»",
    "hmac=«a1b2C3d4e5f6G7h8i9»",
    "recovery=«a1b2C3d4e5f6G7h8i9»",
]
SIGNS = [
    # nested
    "'passphrases': {'admin': '«hunter22»'}",
    "passphrases => {admin => «hunter22»}",
    '"passphrases" := {{ hunter22 }}',
    '"passphrases": {%hunter22%}',
    # assign: the end of the name
    '"userPwd": "«Hunter22»"',
    '\\\\"userPwd\\\\": \\\\"«Hunter22»\\\\"',
    "**userPwd**: «Hunter22»",
    "env['userPwd'] = '«Hunter22»'",
    "passphrase (base58): «Hunter22»",
    'var userPwd string = "«Hunter22»"',
    # assign: the sign
    'userPwd := "«Hunter22»"',
    'userPwd => "«Hunter22»"',
    'userPwd = "«Hunter22»"',
    'userPwd ||= "«Hunter22»"',
    'userPwd ?= "«Hunter22»"',
    'userPwd ??= "«Hunter22»"',
    'userPwd += "«Hunter22»"',
    'userPwd &&= "«Hunter22»"',
    'userPwd == "«Hunter22»"',
    'userPwd === "«Hunter22»"',
    "userPwd: «Hunter22»",
    "userPwd::Hunter22",
    "userPwd%3D«Hunter22»",
    "userPwd%3A«Hunter22»",
    # assign: a type before the value
    'userPwd: &\'static str = "«Hunter22»"',
    'userPwd: &static str = "«Hunter22»"',
    'userPwd: &str = "«Hunter22»"',
    'userPwd: string? = "«Hunter22»"',
    'userPwd: str = "«Hunter22»"',
    'userPwd: SecretStr = "«20240501»"',
    'userPwd: Optional[str] = "«Hunter22»"',
    'userPwd: str | None = "«Hunter22»"',
    'userPwd: varchar = "«Hunter22»"',
    # assign: what else may stand before the value
    "**userPwd:** «Hunter22»",
    "userPwd: # of the database\n  «Hunter22»",
    "userPwd = /* old */ «Hunter22»",
    "userPwd: !!str «Hunter22»",
    "userPwd: |-\n  «Hunter22»",
    # value: a member with the name, then one with the value
    "name: DB_PSW, value: «Hunter22»",
    "name: DB_PSW\n  value: «Hunter22»",
    "- name: DB_PSW\n- value: «Hunter22»",
    '"name": "DB_PSW", "value": "«Hunter22»"',
    '{\\"name\\":\\"DB_PSW\\",\\n\\"value\\":\\"«Hunter22»\\"}',
    "name: DB_PSW\\u005cnvalue: «Hunter22»",
    "name: DB_PSW\n# old\nvalue: «Hunter22»",
    "name: DB_PSW /* old */ value: «Hunter22»",
    'variable "db_psw" {\n  type = string\n  sensitive = true\n  default = "«Hunter22»"\n}',
    'variable "db_psw" {\n  type = string\\u005cn  sensitive = true\n  default = "«Hunter22»"\n}',
    'variable "db_psw" {\n  sensitive = true\n  default = "«Hunter22»"\n}',
    'variable "db_psw" {\n  description = "Of the database"\n  default = "«Hunter22»"\n}',
    '"name": "DB_PSW", "type": "plain", "value": "«Hunter22»"',
    "name=DB_PSW, parameter_value=«Hunter22»",
    "name=DB_PSW, secretValue=«20240501»",
    "name=DB_PSW, env_value=«Hunter22»",
    "name=DB_PSW, headerValue=«Hunter22»",
    "name=DB_PSW, default=«Hunter22»",
    "name=DB_PSW, plaintext=«Hunter22»",
    "name=DB_PSW, text=«Hunter22»",
    "name=DB_PSW, content=«Hunter22»",
    # tag
    "<userPwd>«Hunter22»</userPwd>",
    '<userPwd type="x">«Hunter22»</userPwd>',
    '<x name="userPwd">«Hunter22»</x>',
    "<key>userPwd</key>\n<string>«Hunter22»</string>",
    # list
    '["--user-pwd", "«Hunter22»"]',
    "run('--user-pwd', b'«Hunter22»')",
    '"passphrases": ["«Hunter22»", "«Summer23»"]',
    "setenv('x[\"DB_PSW\"]', '«Hunter22»')",
    'find("passphrase").send_keys("«Hunter22»")',
    'find("passphrase").sendline("«Hunter22»")',
    'find("passphrase").fill("«Hunter22»")',
    'find("passphrase").type("«Hunter22»")',
    'find("passphrase"); page.send("«Hunter22»")',
    # prose
    "the client_token for the user ada: «Hunter22x»",
    "the client_token of ada: «Hunter22x»",
    "the client_token is generated for the user ada: «Hunter22x»",
    "the client_token is as follows: «Hunter22x»",
    "the client_token was as follows: «Hunter22x»",
    'the client_token is "«Hunter22x»"',
    'the client_token was "«Hunter22x»"',
    'the client_tokens are "«Hunter22x»"',
    'the client_token will be "«Hunter22x»"',
    'the client_token set to "«Hunter22x»"',
    '"client_token" is: «Hunter22x»',
    # loose
    "--user-pwd «Hunter22»",
    "| user_pwd | «Hunter22» |",
    "| user_pwd|«Hunter22» |",
    "| `user_pwd` | «Hunter22» |",
    # before the value
    "userPwd: [REDACTED:email]",
    *(f"userPwd: {name}=Hunter22" for name in ("key", "sig", "sid", "jwt", "otp", "pin", "auth", "sess", "hmac")),
    *(f"userPwd: {name}=«Hunter22»" for name in ("cred", "pass")),
    *(f"userPwd: {name}=«'it\"s4me'»" for name in ("token", "secret")),
    "userPwd: .key=Hunter22",
    "<userPwd>«x Y7 z9»</userPwd>",
    'userPwd = f"«Hunter22»"',
]
VALUES = [
    "userPwd = '«it\"s4me»'",
    'userPwd = \\"«Hunter22»\\" and \\"so on\\"',
    "userPwd = `«Hunter22»`",
    "userPwd: «Hunter22», port: 5432",
    # of names that need a random value
    "sid = b'«a1b2C3d4e5f6G7h8i9»'",
    "sid = a1b2C3d4",
    "sid = «a1b2C3d4e5f6G7h8i9==»",
    # of tags
    "<userPwd>«Hunter 22»</userPwd>",
    "<userPwd>«Hunter22»\n</userPwd>",
    # of objects
    "'passphrases': {'admin': '«hunter22»', 'bob': '«summer23»'}",
    "'passphrases': {admin: «hunter22», bob: «summer23»}",
    "{'DB_PSW': {'value': '«hunter»'}}",
    "{'DB_PSW': {'admin': 'hunter'}}",
    # before their names
    '{"value": "«Hunter22»", "name": "DB_PSW"}',
    "{value=«Hunter22», name=DB_PSW}",
    "{text=«Hunter22»; key=DB_PSW}",
    "{value=«Hunter22»\n header=DB_PSW}",
    '{"value":"«Hunter22»"\\u005cnname:DB_PSW}',
    '{"value":"«Hunter22»","variable":"DB_PSW"}',
    '{"value":"«Hunter22»","field":"DB_PSW"}',
    '{"value":"«Hunter22»","env":"DB_PSW"}',
    '{"value":"«Hunter22»","param":"DB_PSW"}',
    '{"value":"Hunter22","param":"DB_PORT"}',
    # in tables
    "id|db_psw\n1|«Hunter22»\n2|«Summer23»\n",
    "id,db_psw\n1,«Hunter22»\n\n2,Summer23\n",
    "id;db_psw\n1;«Hunter22»\n",
    "id\tdb_psw\n1\t«Hunter22»\n",
    # in SQL
    "insert into t (id, psw) values (1, '«Hunter22»'), (2, \"«Summer23»\")",
    "REPLACE INTO t (psw, id) VALUES ('«Hunter''22»', 1)",
    "insert into t (psw, id) values ('«Hunter\\'22»', 1)",
    "insert ignore into t (at, psw) values (later(1, 2), '«Hunter22»')",
    # in a Secret of Kubernetes
    "kind: Secret\ndata:\n  a: «aHVudGVyMjI»\n  b: '«aHVudGVyMjI»'\n",
    'kind: "Secret"\nstringData:\n  a: «hunter22»',
    # in a form
    '<input name="db_passwd" type="x">«Hunter22»</input>',
    "<input key='x_apikey'>«Hunter22»</input>",
]
CASES = [
    (re.sub("[«»]", "", case), re.sub("«[^»]*»", "[REDACTED:password]", case)) for case in (*NAMES, *SIGNS, *VALUES)
]
"""What is between « and » goes."""


@pytest.mark.parametrize(("text", "cleaned"), CASES, ids=[text for text, _ in CASES])
def test_the_value_of_a_name_goes_and_nothing_else(text: str, cleaned: str) -> None:
    assert redact_text(text, "aggregated", "strict")[0] == cleaned
