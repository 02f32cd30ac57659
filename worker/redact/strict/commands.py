"""Secrets in commands, statements and calls: the value of an option, or an argument at a position that holds one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from worker.redact.markers import Found, Rule, rule
from worker.redact.strict.forms import end_of
from worker.redact.strict.names import PROSE, harmless, is_random, is_typed, is_value, looks_secret

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
