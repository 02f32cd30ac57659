"""Secrets that a text tells of: behind a word for them in many languages, and in places that a protocol or form gives.

A word for a secret is followed by its value at once (`Kennwort: x`), behind a verb (`le mot de passe est x`) or behind
some words more. So no grammar is needed: of the next words the first that can only be a password is one, and behind a
sign or a verb also one that may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from worker.redact.keys import decoded
from worker.redact.markers import Found, Rule, most_names, rule
from worker.redact.names import (
    IF_RANDOM,
    PASSWORD,
    VALUE_MEMBERS,
    harmless,
    is_random,
    is_value,
    labels_secret,
    likely,
    looks_secret,
    strength_of,
)

_ENGLISH: Final = (
    "password", "passphrase", "passcode", "pass phrase", "secret key", "api key", "access code", "secret is",
)  # fmt: skip
_WORDS: Final = (
    "passwort", "kennwort", "zugangscode", "geheimzahl", "mot de passe", "code secret", "phrase secrète",
    "clé secrète", "clé api", "contraseña", "contrasena", "contraseñas", "clave secreta", "clave de acceso", "senha",
    "palavra-passe", "palavra passe", "parola d'ordine", "parola", "codice segreto", "chiave segreta", "wachtwoord",
    "toegangscode",
    "lösenord", "adgangskode", "kodeord", "passord", "salasana", "tunnussana", "lykilorð", "hasło", "hasłem", "heslo",
    "jelszó", "jelszav", "lozinka", "lozinku", "geslo", "парол", "κωδικός πρόσβασης", "κωδικό πρόσβασης",
    "συνθηματικό", "şifre", "parool", "slaptažodis", "parolă", "parolei", "mật khẩu", "kata sandi",
)  # fmt: skip
"""Words for a password and the like, in lower case; an ending may follow."""
_UNSPACED: Final = (
    "كلمة المرور", "كلمة السر", "رمز عبور", "گذرواژه", "סיסמה", "סיסמא", "पासवर्ड", "পাসওয়ার্ড", "รหัสผ่าน", "密码", "密碼",
    "口令", "パスワード", "暗証番号", "비밀번호", "암호",
)  # fmt: skip
"""Those before which a letter may stand, as words are not spaced there, or have prefixes."""

_VERBS: Final = frozenset(
    (
        "is", "was", "are", "be", "to", "as", "set", "lautet", "ist", "war", "est", "sera", "es", "será", "é", "foi",
        "è", "sarà", "zijn", "är", "blir", "er", "var", "on", "oli", "jest", "je", "byl", "este", "era", "\u0435", "є",
        "це", "это", "είναι", "olarak", "היא", "הוא", "है", "হল", "là", "adalah", "ialah",
        "是", "为", "為", "は", "는", "은",
    )
)  # fmt: skip
_CASED: Final = {form for word in (*_ENGLISH, *_WORDS, *_UNSPACED) for form in (word, word.upper(), word.capitalize())}
_HINT: Final = "|".join(re.escape(form) for form in sorted(_CASED))
_WORD: Final = re.compile(
    rf"(?<![^\W_])(?:(?P<english>{'|'.join(_ENGLISH)})(?![a-z0-9_(])"
    rf"|(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))}))"
    rf"|{'|'.join(_UNSPACED)}"
)
_ENDING: Final = re.compile(r"[^\W\d_]{0,8}+(?![a-z0-9_(])")
_NEXT: Final = re.compile(
    r"(?P<gap>(?:[^\w\n\"'`<>$%&*+!?@#\\~^({\[]|->|=>|<-){0,8}(?:\n[ \t]{0,8})?)"
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\"'`\n]{1,100})(?P=quote)|(?P<bare>[^\s\"'`<>()\[\]{},;|:=]{1,100}+))"
)
_MOST_WORDS: Final = 7
_CANDIDATE: Final = re.compile("[0-9\"'`]")
"""No value is without one of these."""
_KNOWN: Final = re.compile(
    r"(?i:oauth|sha-?[0-9]|md5|base64|utf-?[0-9]|pbkdf|argon2|bcrypt|python|http|ipv[46]|x509|win(?:32|64)|pkcs|1password"
    r"|pass[a-z]{0,9}[0-9]{0,2}$|[a-z]{1,12}\([^)]*\)?$)"
)
_NUMBER_AND_UNIT: Final = re.compile(r"[0-9]+(?:[-.]?[a-z]+|[-.][0-9]+)*|[a-z]+(?:_[a-z]+)*_?[0-9]{1,2}")
_STRONG_GAP: Final = re.compile(r"[:=>\u2192|<]|(?<=[ ])-(?=[ ])")


def _told(text: str, lowered: str) -> Iterator[Found]:
    left, done = most_names(len(text)), 0
    for word in _WORD.finditer(lowered):
        left -= 1
        if left < 0:
            yield Found(word.start(), len(text), "password")
            return
        if word.start() < done:
            continue
        english = word["english"] is not None
        end = word.end()
        if not english:
            ending = _ENDING.match(lowered, end)
            if ending is None:
                continue
            end = ending.end()
        found = _value_told(text, end, verb=not english and not text[end - 1].isascii() and end > word.end(),
                            english=english)  # fmt: skip
        if found is not None:
            done = found[1]
            yield Found(*found, "password")


def _value_told(text: str, place: int, *, verb: bool, english: bool) -> tuple[int, int] | None:
    """Return the place of the value that a word for a secret, which ends at `place`, is followed by."""
    if not _CANDIDATE.search(text, place, place + 120):
        return None
    sign = False
    for number in range(_MOST_WORDS):
        match = _NEXT.match(text, place)
        if match is None:
            return None
        gap, quoted = match["gap"], match["quoted"]
        if number and re.search(r"[.;\n]", gap):
            return None
        sign = sign or (_STRONG_GAP.search(gap) is not None)
        group = "bare" if quoted is None else "quoted"
        start, end = match.span(group)
        value = match[group]
        if quoted is None:
            value = value.rstrip(".")
            end = start + len(value)
            if text[end : end + 1] in ("(", "[", "{"):
                return None
        near = verb or (sign and not (english and ":" in gap + "=" and number == 0 and re.search("[:=]", gap)))
        near = near or (quoted is not None and not english and not gap.strip(" :=,"))
        if near and _may_be(value, quoted=quoted is not None):
            return start, end
        if _must_be(value) and not (number and _NAME_AND_YEAR.fullmatch(value)):
            return start, end
        if english and number == 0 and value.lower() in _OTHER_THINGS:
            return None
        said = text[start:end].lower()
        verb = said in _VERBS or (verb and said in _FILLERS)
        if _NO_WORD.search(value):
            return None
        place = match.end()
        sign = text[place : place + 1] in (":", "=")
    return None


_NAME_AND_YEAR: Final = re.compile("[A-Z][a-z]+[0-9]{1,4}")
_OTHER_THINGS: Final = frozenset(
    [
        "manager",
        "managers",
        "policy",
        "policies",
        "hash",
        "hashes",
        "hashing",
        "field",
        "fields",
        "reset",
        "form",
        "input",
        "generator",
        "strength",
        "entropy",
        "store",
        "vault",
        "file",
        "column",
        "length",
        "prompt",
        "rules",
        "requirements",
        "protection",
        "based",
        "less",
        "type",
    ]
)
"""What is no password, although the word is in its name."""
_NO_WORD: Final = re.compile(r"\d|[!-&*+./@\[-`{-~]")
_FILLERS: Final = frozenset(
    ["now", "set", "still", "currently", "jetzt", "nun", "ahora", "agora", "maintenant", "ora", "nu", "teraz"]
)


def _may_be(value: str, *, quoted: bool) -> bool:
    """Whether what stands where a value is expected is a password."""
    if " " in value:
        words = value.split()
        return (
            quoted and 3 <= len(words) <= 24 and all(w.isalpha() and w.islower() for w in words) and not harmless(value)
        )
    return (
        (
            likely(value, PASSWORD)
            and any(map(str.isalpha, value))
            and not _KNOWN.match(value)
            and not _NUMBER_AND_UNIT.fullmatch(value)
        )
        or _must_be(value)
        or (len(value) >= 6 and _WORD_AND_NUMBER.fullmatch(value) is not None)
    )


_WORD_AND_NUMBER: Final = re.compile(
    r"(?!step|user|line|page|file|item|field|option|version|input|form|test)[a-z]{4,}[0-9]{1,6}[!?.]?"
)


def _must_be(value: str) -> bool:
    """Whether a word can only be a password: small and capital letters, or letters and signs, with digits."""
    if not 8 <= len(value) <= 64 or not looks_secret(value) or _KNOWN.search(value) or "/" in value or "@" in value[1:]:
        return False
    digits, small = any(map(str.isdigit, value)), any(map(str.islower, value))
    return digits and small and (any(map(str.isupper, value)) or any(c in "!#$%^&*?+~" for c in value))


_REVERSED: Final = re.compile(
    r"(?<=[^\s,;:])[ ](?:as|is)[ ](?:the|my|your|our|his|her|a|its)[ ](?:[a-z]{1,12}[ ]){0,2}"
    r"(?:password|passphrase|passcode|verification code|pin)(?![\w-]|[ ](?:manager|field|policy|owner|column|name))",
    re.IGNORECASE,
)
_BEFORE: Final = re.compile(r"(?:\A|(?<=[\s\"'`(]))(?P<secret>[^\s\"'`()<>,;:]{6,64}+)[\"'`]?\Z")
_CODE: Final = re.compile("(?:[A-Z]-)?[0-9]{4,8}")


def _told_before(text: str, _lowered: str) -> Iterator[Found]:
    for match in _REVERSED.finditer(text):
        begin = max(0, match.start() - 66)
        words = text[begin : match.start()].rsplit(None, 1)
        found = _BEFORE.search(text, match.start() - len(words[-1]), match.start()) if words else None
        if found and (_may_be(found["secret"], quoted=False) or _CODE.fullmatch(found["secret"])):
            yield Found(*found.span("secret"), "password")


# -- pairs of a label and a value in one object

_OBJECT: Final = re.compile(r"\{[^{}]{8,1500}+\}")
_PAIR: Final = re.compile(
    r"(?P<escapes>\\{0,7})(?P<quote>[\"'])(?P<name>[A-Za-z][A-Za-z0-9_. -]{0,40})(?P=escapes)(?P=quote)\s{0,4}:\s{0,4}"
    r"(?P=escapes)(?P<other>[\"'])(?P<value>(?:[^\"'\\\n]|\\{1,7}[^\n]|(?!(?P=other))[\"']){1,300}+)"
)


def _fields(text: str, _lowered: str) -> Iterator[Found]:
    for whole in _OBJECT.finditer(text):
        pairs = list(_PAIR.finditer(text, whole.start(), whole.end()))
        if len(pairs) < 2 or not any(labels_secret(pair["name"], pair["value"]) for pair in pairs):
            continue
        for pair in pairs:
            if pair["name"].lower() in VALUE_MEMBERS and field_value(pair["name"], pair["value"]):
                yield Found(*pair.span("value"), "password")


def field_value(name: str, value: str) -> bool:
    """Whether a field beside the label of a password field holds one."""
    if " " in value.strip() or harmless(value):
        return False
    return likely(value, PASSWORD) or (name.lower() in ("value", "val") and len(value) >= 4 and not value.istitle())


# -- forms and protocols

_PART: Final = re.compile(
    r"form-data;[^\n\"]{0,40}name=\\{0,7}\"(?P<name>[^\"\\\n]{1,80})\\{0,7}\"[^\n]{0,120}[\r\n]{1,4}"
    r"(?:[A-Za-z-]{1,30}:[^\r\n]{0,200}[\r\n]{1,4}){0,4}?[\r\n]{1,4}(?P<secret>[^\r\n]{1,4000}+)"
)


def _parts(text: str, _lowered: str) -> Iterator[Found]:
    for match in _PART.finditer(text):
        if strength_of(match["name"]) > IF_RANDOM and not harmless(match["secret"]):
            yield Found(*match.span("secret"), "password")


_INSERT: Final = re.compile(
    r"(?:insert|replace)\s{1,8}(?:ignore\s{1,8})?into\s{1,8}[\w.`\"\[\]]{1,100}+\s{0,8}"
    r"\((?P<columns>[^()]{1,1000}+)\)\s{0,8}"
    r"values\s{0,8}(?=\()"
)
_ROW: Final = re.compile(
    r"\s{0,8},?\s{0,8}\((?P<row>(?:[^()'\"]++|'(?:[^'\\\n]|''|\\.)*+'|\"[^\"\n]*+\"|\([^()]{0,100}\))*+)\)"
)
_ITEM: Final = re.compile(
    r"\s*+(?:'(?P<one>(?:[^'\\]|''|\\.)*+)'|\"(?P<two>[^\"]*+)\"|(?:[^,'\"(]|\([^()]*+\))++)\s*+(?:,|$)"
)


def _inserts(text: str, lowered: str) -> Iterator[Found]:
    for match in _INSERT.finditer(lowered):
        columns = [column.strip(" \n\t`\"[]'") for column in text[slice(*match.span("columns"))].split(",")]
        wanted = {number for number, column in enumerate(columns) if strength_of(column) > IF_RANDOM}
        place = match.end()
        while wanted and (row := _ROW.match(text, place)) is not None:
            place = row.end()
            for number, item in enumerate(_ITEM.finditer(text, *row.span("row"))):
                group = "one" if item["one"] is not None else "two"
                if number in wanted and item[group] and not harmless(item[group]):
                    yield Found(*item.span(group), "password")


_SECRET_KIND: Final = re.compile(r"kind:[ ]{0,4}[\"']?Secret\b")
_SECRET_DATA: Final = re.compile(r"\n[ ]{0,8}(?:stringData|data):[ ]{0,8}\n")
_MOST_HEAD: Final = 3000
_YAML_LINE: Final = re.compile(
    r"[ ]{1,20}[\w.-]{1,80}:[ ]{1,4}[\"']?(?P<secret>[^\s\"'|>][^\n\"']{2,4000}+)[\"']?(?:\n|$)"
)


def _kubernetes(text: str, _lowered: str) -> Iterator[Found]:
    done = 0
    for kind in _SECRET_KIND.finditer(text):
        if kind.start() < done:
            continue
        done = kind.end() + _MOST_HEAD
        data = _SECRET_DATA.search(text, kind.end(), done)
        if data is None:
            continue
        place = data.end()
        while line := _YAML_LINE.match(text, place):
            place = line.end()
            if not harmless(line["secret"]):
                yield Found(*line.span("secret"), "password")


_SEED_HINT: Final = re.compile(r"seed|mnemonic|recovery|backup phrase|wallet|secret phrase|(?:12|24)[ -]words?")
_SEED: Final = re.compile(
    r"(?<![a-z])[a-z]{3,8}(?:[\s,\"'\]]{1,4}(?:[0-9]{1,2}[.):]?[ ]{0,2})?[\"']?[a-z]{3,8}){11,23}+(?![a-z])"
)
_NO_SEED: Final = re.compile(
    r"\b(?:the|and|with|for|your|are|was|has|not|but|which|from|into|will|must|they|have|its)\b"
)
_BEHIND_HINT: Final = 200


def _seeds(text: str, lowered: str) -> Iterator[Found]:
    done = 0
    for hint in _SEED_HINT.finditer(lowered):
        if hint.start() < done:
            continue
        done = hint.end() + 60
        place = hint.end()
        for _ in range(6):
            found = _SEED.search(text, place, hint.end() + _BEHIND_HINT + 300)
            if found is None or found.start() > hint.end() + _BEHIND_HINT:
                break
            words = _NO_SEED.search(found[0])
            if words is None:
                yield Found(found.start(), found.end(), "password")
                done = found.end()
                break
            place = found.start() + words.end()


def _login(secret: str) -> bool:
    read = decoded(secret)
    return read is not None and len(read) >= 3


def _typed(value: str) -> bool:
    """Whether what stands where only a password is typed is one."""
    return looks_secret(value) or _may_be(value, quoted=False) or _HYPHENATED.fullmatch(value) is not None


_HYPHENATED: Final = re.compile(
    r"[a-z0-9]*[0-9][a-z0-9]*(?:[-_][a-z0-9]{1,20}){1,4}|[a-z]+(?:[-_][a-z0-9]{1,20}){0,3}[-_][0-9]{1,6}"
)

TOLD: Final = (
    Rule(_HINT, _told),
    Rule("password|passphrase|passcode|verification code|pin", _told_before),
    Rule(
        "passw|kennwort|passphrase|passcode|api[ _-]?key|mot de passe|contrase|senha|wachtwoord"
        "|senord|has(?:ł|Ł)o|heslo"
        "|secret key|арол|密码|密碼|パスワード|비밀번호|ifre", _fields,
    ),
    Rule("form-data;", _parts),
    Rule(r"into\s", _inserts),
    Rule("kind:", _kubernetes),
    Rule("seed|mnemonic|recovery|backup phrase|wallet|secret phrase|(?:12|24)[ -]word", _seeds),
    rule(
        "password",
        "auth |authenticate ",
        r"(?:\bAUTH|\bAUTHENTICATE)[ ](?:PLAIN|LOGIN|XOAUTH2|CRAM-MD5|OAUTHBEARER)\s{1,4}(?:\+\s{1,4})?"
        r"(?P<secret>[A-Za-z0-9+/]{8,2000}+={0,2}+)",
        _login,
    ),
    rule(  # the answers to "Username:" and "Password:"
        "password",
        "334 (?:UGFzc3dvcmQ6|VXNlcm5hbWU6)",
        r"334 (?:UGFzc3dvcmQ6|VXNlcm5hbWU6)[\s\"',]{1,12}(?:C: ?|> ?)?(?P<secret>[A-Za-z0-9+/]{4,2000}+={0,2}+)",
    ),
    rule(
        "password",
        " login ",
        r"(?<![^\s>:])[A-Za-z]{0,4}[0-9]{1,6} LOGIN (?:\"[^\"\n]{1,100}\"|[^\s\"]{1,100}) "
        r"\"?(?P<secret>(?:(?<=\")[^\"\n]|[^\s\"]){1}(?:[^\s\"]|(?<=[^\n\"]) (?=[^\n\"]{0,100}\")){1,200})",
    ),
    rule(
        "password",
        "auth ",
        r"(?:(?<![A-Za-z-])AUTH|(?<=> )auth|(?<=>)auth|sentinel auth-pass) "
        r"(?:(?!PLAIN|LOGIN|XOAUTH|CRAM|FAILED|ERROR|OK)[\w.-]{1,40} )?[\"']?(?P<secret>[^\s\"'<>\[\]{}()]{6,200})",
        _typed,
    ),
    rule(
        "password",
        "pin",
        r"\b(?:PIN|Pin)(?:[ -](?:code|number|Code))?[ ]?(?:[:=]|is|was|ist|est|es)[ ]{0,3}"
        r"(?P<secret>[0-9]{4,8})(?![0-9.,:/-])",
    ),
    rule(
        "password",
        "setx ",
        r"(?i:setx) (?=\S{0,60}(?:PASS|TOKEN|KEY|SECRET|PWD|CRED))\S{1,80} [\"']?"
        r"(?P<secret>[^\s\"'/%][^\s\"']{3,300})",
        is_value,
    ),
    rule("password", "vault login", r"\bvault login (?:-\S{1,40} ){0,3}(?P<secret>[sh](?:vs)?\.[A-Za-z0-9]{8,200})"),
    rule("password", "password>", r"(?i:password)>[ ]?\n(?P<secret>[^\s]{6,100})(?=\n)", _typed),
    rule(  # the two keys of AWS, one behind the other, without names
        "password",
        r"\[redacted:api_key\]|(?:AK|AS)IA",
        r"(?:(?:AKIA|ASIA)[A-Z0-9]{16}|\[REDACTED:api_key\])[\s,;:|\"'/\\]{1,12}"
        r"(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        is_random,
    ),
    rule(
        "password",
        "name=|key=",
        r"(?=[nk])(?:name|key)=[\"'](?=[\w.-]{0,60}(?i:passw|secret|token|pwd|apikey|api_key))[\w.-]{1,80}[\"'][^<>\n]{0,80}>"
        r"(?P<secret>[^<>\s]{3,300})</",
        is_value,
    ),
)  # fmt: skip
