"""Values assigned to the name of a secret: where name and value are, and whether the value is a secret.

`assigned_secrets` looks for a name (_NAME), reads the sign behind it (_SIGN: how the text connects name and value), and
judges the value by both. The patterns are written with re.VERBOSE, one alternative per line, with an example.
"""

import re
import string
from collections.abc import Iterator
from typing import Final, NamedTuple

from worker.redact.forms import rules_of
from worker.redact.markers import Found, Rule, most_names, most_secrets
from worker.redact.names import (
    DATE_OR_NUMBER,
    IF_MIXED,
    IF_RANDOM,
    NO,
    PASSWORD,
    TOKEN,
    VALUE_MEMBERS,
    WORDS,
    harmless,
    is_clear,
    is_given,
    is_long_word,
    is_mixed,
    is_random,
    likely,
    looks_secret,
    pattern,
    strength_of,
)  # fmt: skip

# -- names, signs and values

_NAME_CHARACTERS: Final = string.digits + string.ascii_letters + "_.-"

ANY_STEM: Final = (
    "pass|pw|psk|assword|secret|token|key|cred|auth|sig|sess|sid|jwt|otp|pin|psw|cvv|cvc|mnemonic|hmac|recovery"
    r"|_pat\b|\bpat_|\bpat\b|patfor"
)
"""Each text with a name contains one of these, ignoring case."""

_NAME: Final = pattern(
    r"""
    (?:
        pass                            # password, DB_PASS, requirepass
      | assword                         # expect("assword:"), which fits both cases of the P
      | psk(?![a-z])                    # WIFI_PSK
      | pwd                             # userPwd
      | psw                             # admin_psw
      | pw(?![a-z])                     # root_pw, bindpw
      | secret                          # client_secret
      | sess                            # session_id
      | sig(?:nature|(?![a-z]))         # signature, sig, but not signal
      | sid(?![a-z])                    # connect.sid, but not side
      | token                           # access_token
      | key                             # api_key
      | cred                            # credentials
      | cv[vc](?![a-z])                 # cvv, cvc
      | auth(?!orization)               # oauth; forms.py reads Authorization
      | jwt | otp
      | pin(?:code|(?![a-z]))           # pin, pincode, but not ping
      | mnemonic | hmac | recovery
      | pat(?: (?<![a-z]...) (?![a-z]) | (?=for) )    # GH_PAT, patForAzure, but not path
    )
    [a-z0-9_.-]{0,48}+                  # the rest of the name
    (?= [\s"'`\\*\]:=%,;{<>|?+&-] )     # a sign may follow,
    (?! ["'`]?[ \t]?[:=][ \t]?["'`]?\[redacted: )   # but no marker
    """
)
"""A name from its stem on, in lower case, if what follows may assign a value to it and is not a marker."""

_SIGN: Final = pattern(
    r"""
    # "passwords": { ... }, but no template: {{ name }}, {% name %}
    (?P<nested> (?&quote)?+ [ \t]{0,8}+ (?:=>|[:=]) [ \t]{0,8}+ \{(?![{%]) )
    | (?:
        (?P<assign>
            (?: (?&quote) | \*{1,2} )?                              # "name": value   **name**: value
            \]{0,2}                                                 # env["name"] = value
            (?: [ ][\[(][^\])\n]{0,40}[\])](?=[ ]?:) )?             # name (base58): value
            (?: [ \t]{1,4}string(?=[ \t]{1,4}=) )?                  # var name string = value
            [ \t]{0,40}+
            (?:
                := | =>                                             # name := value   name => value
              | (?: \|\| | \?\?? | \+ | && )?=                      # name = value   name ||= value
              | ={2,3}+                                             # name == value
              | :(?!:)                                              # name: value, but not name::value
              | %3[ad]                                              # name%3Dvalue
            )
            (?:                                                     # name: str = value
                [ \t]{0,40}
                (?: &'?static[ ]str | &str | string\?? | str | secretstr | optional\[str\] | str[ ]\|[ ]none | varchar )
                [ \t]{0,4}=
            )?
            (?: \*{1,2}(?=[ \t]) )?                                 # **name:** value
            [ \t]{0,40} (?&comment)?                                # name: # comment, and the value in the next line
            (?: !!str[ ] | [|>][-+]?\n[ ]{1,20} )?                  # name: !!str value   name: |-, and the value
        )
      | (?P<value>                                                  # name: NAME, value: value
            (?&quote)?+ [ \t]{0,4}+ [,;{]?+
            (?: [ \t\r\n] | \\{1,7}[nrt] | -[ \t] ){0,40}+ (?&comment)?+
            (?:                                                     # variable "name" { type = string, default = value
                type[ \t]{0,8}=[ \t]{0,4} [a-z]{1,10} (?&blanks)
              | sensitive[ \t]{0,8}=[ \t]{0,4} [a-z]{4,5} (?&blanks)
              | description[ \t]{0,8}=[ \t]{0,4} \\{0,7}"[^"\n]{0,100}" (?&blanks)
            ){0,3}
            (?:                                                     # "name": "NAME", "type": "x", "value": value
                (?&string_quote)?type(?&string_quote)?[ \t]{0,4}[:=][ \t]{0,4}
                (?&string_quote)?[a-z]{1,20}(?&string_quote)?,?[ \t\r\n]{0,20}
            )?
            (?&string_quote)?
            (?: (?:parameter|secret|env|header)?_?value | default | plaintext | text | content )
            (?&string_quote)? [ \t]{0,8}[:=][ \t]{0,8}
        )
      | (?P<tag>
            ["']? (?: [ \t][a-z:]{1,20}=[^<>\n]{0,100} )? >         # <name a="b">value   <x name="name">value
          | </key>\s{0,20}<string>                                  # <key>name</key><string>value
        )
      | (?P<list>
            (?: (?&quote) (?: \] (?&quote) )? )?+ [ \t]{0,4}+
            (?: , | :[ \t]{0,4}+\[ )                                # "--name", "value"   "name": ["value"]
            [ \t\r\n]{0,40}+ (?=[rbfu]?(?&quote))
          | [^\w\n]{0,8} \s{0,12} (?:[\w.]{1,30}\.)?                # NAME").send_keys("value"
            (?: send_?(?:line|keys)? | fill | type ) [\s(-]{1,4} (?=["'])
        )
      | (?P<prose>
            ["'`]? [ \t]
            (?:
                (?: for | of | is[ ]generated[ ]for )               # name for the user x: value
                (?: [ \t][^\s:]{1,60}+ ){1,5}+ (?=:[ \t])
              | (?:is|was) (?: [ \t][a-z]{2,12} ){1,3} (?=:[ \t])   # name is as follows: value
              | (?: is | was | are | will[ ]be | set[ ]to ) (?= : | [ \t] )     # name is value
            )
            :? [ \t]{1,4}
        )
      | (?P<loose>
            (?: \\{0,7}["'`*]{1,2} )?
            (?: [ \t]{1,40} (?: \|[ \t]{0,40} )?                    # --name value   name | value
              | \|[ \t]{0,40}                                       # name|value
            )
            (?= [^\s|=:] )
        )
    )
    (?! \\{0,7}["'`]?\[redacted: )                                  # no marker, but
    (?= [rbfun]{0,2} \\{0,7}["'`]                                   # a quoted value,
      | (?! \W? (?:key|sig|sid|jwt|otp|pin|auth|cred|pass|sess|token|secret|hmac)= ) [^\s"'`<>]{4}  # a bare one
      | (?<=>) [^<>\s][^<>]{3}                                      # or the text of a tag
    )
    """
)
"""The text between a name and its value, in lower case."""

_VALUE: Final = pattern(
    r"""
    [rbfuRBFUN]{0,2} (?P<escapes>\\{0,7}+) (?P<quote>["'`])         # of r"x", b"x", N'x'
    (?P<quoted> (?: (?! (?<!\\) (?P=escapes) (?P=quote) ) [^\r\n] ){1,4096}+ )
  | (?P<bare> [^\s"'`<>,;&|\\(){}\[\]]{1,4096}+ )
    """
)
_WEAK_VALUE: Final = pattern(
    r"""
    [rbf]? (?P<escapes>\\{0,7}+) (?P<quote>["'`])
    (?P<quoted> [A-Za-z0-9+/_.~%=:!$|-]{16,4096}+ ) (?P=escapes) (?P=quote)
  | (?P<bare> [A-Za-z0-9+/_.~%-]{16,4096}+ ={0,2}+ )
    """
)
"""A value without characters that may form a name and a separator, so that no text is read twice."""

_TAGGED_VALUE: Final = re.compile(r"(?P<quoted>[^<>\r\n]{1,300}+)(?=</)|(?P<bare>[^\s<>]{1,300}+)")
_ENV_VALUE: Final = re.compile(r"[^\s\"'`\\]{1,4096}+")
_REST_OF_LINE: Final = re.compile(r"[^\r\n\"'\\]{1,300}")
_PROSE_LINE: Final = pattern("(?&prose)")
_SHORT_NUMBER: Final = re.compile(r"[0-9.,]{1,12}+(?![^\s,;}\]])")

_TEST: Final = re.compile(r"(?i:test)|\S+ \([0-9.]+ ?m?s\)|\S+::|[\w.-]+/")
"""After PASS, what a test runner prints: a test, its file, its time."""

_ENV_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_SPACED: Final = ("api ", "access ", "secret ", "private ", "signing ", "encryption ", "master ", "license ")
_LOOSE_BEGINS: Final = re.compile(r"(?:\n|[Ee][Nn][Vv] |\| )\Z")
"""The text before a word that makes it a name even if only blanks follow."""


class _Assignment(NamedTuple):
    """A name in front of a value."""

    how: str  # group of _SIGN; "mentioned": a loose name within a line
    sign: str  # text of that group
    name: str
    strength: int
    before: str  # the character before the name


def assigned_secrets(text: str, lowered: str) -> Iterator[Found]:
    """Yield the places of values whose names make them secrets. `lowered`: the text in lower case."""
    if "[redacted:" in lowered:
        for name in ("password", "private_key", "api_key", "basic_auth", "bearer_token"):  # they name no secrets
            lowered = lowered.replace(f"[redacted:{name}]", f"[redacted:{'#' * len(name)}]")
    yield from _values_before_names(text, lowered)
    left, names, place = most_secrets(len(text)), most_names(len(text)), 0
    spaced = " key" in lowered
    headers: list[int] = []  # names without a value, which may be column names
    while stem := _NAME.search(lowered, place):
        place = stem.end()
        names -= 1
        if names < 0:
            yield Found(stem.start(), len(text), "password")
            return
        sign = _SIGN.match(lowered, place)
        to = None if sign is None else _assignment(text, stem.start(), sign, spaced=spaced)
        if sign is None or to is None:
            headers.append(stem.start())
            continue
        if to.how == "nested":
            yield from _nested(text, to, sign.end())
            continue
        form = _WEAK_VALUE if to.strength == IF_RANDOM else _TAGGED_VALUE if to.how == "tag" else _VALUE
        value = form.match(text, sign.end())
        if value is None:
            headers.append(stem.start())
            continue
        left -= 1
        if left < 0:
            yield Found(sign.end(), len(text), "password")
            return
        secret = _secret(text, to, value)
        if secret is not None:
            yield secret
            place = secret.end
        else:
            headers.append(stem.start())
        if "[" in to.sign and to.how == "list":
            for more in _items(text, to, value):
                yield more
                place = more.end
    if "\n" in text:
        yield from _below(text, headers)


def _assignment(text: str, start: int, sign: re.Match[str], *, spaced: bool) -> _Assignment | None:
    """Return the assignment; None: not a secret's name.

    `start`: where the stem of the name begins; `spaced`: the text may contain a name of two words, such as "API key".
    """
    how, end = sign.lastgroup or "", sign.start()
    begin = start
    if start and text[start - 1] in _NAME_CHARACTERS:
        read = text[max(0, start - 48) : start]
        begin = start - len(read) + len(read.rstrip(_NAME_CHARACTERS))
        if start - begin >= 2 and text[begin - 1 : begin] == "%":
            begin += 2
    name = text[begin:end]
    if how == "loose" and not ("_" in name or "-" in name or begin == 0):
        how = "loose" if _LOOSE_BEGINS.search(text, max(0, begin - 4), begin) else "mentioned"
    if spaced and text[begin - 1 : begin] == " " and text[max(0, begin - 11) : begin].lower().endswith(_SPACED):
        name = f"api_{name}"  # "API key: x"
    if name.endswith("--"):  # -----END PRIVATE KEY-----
        return None
    strength = strength_of(name)
    if how == "list" and sign.group()[:1] in ", \t" and not _ENV_NAME.fullmatch(name):
        return None  # f(token, "x") in code
    if strength == NO or (strength == TOKEN and _SHORT_NUMBER.match(text, sign.end())):
        return None
    if name == "PASS" and (text.endswith("--- ", 0, begin) or _TEST.match(text, sign.end())):
        return None
    return _Assignment(how, sign.group(), name, strength, text[begin - 1 : begin])


def _secret(text: str, to: _Assignment, value: re.Match[str]) -> Found | None:
    """Return the place of a value if it is a secret."""
    quoted = value["quoted"] is not None
    start, end = value.span("quoted" if quoted else "bare")
    if not quoted:
        read = _bare_end(text, to, start, end)
        if read is None:
            return None
        end = read
    content = text[start:end]
    if content[0] in ",)" and quoted:  # print("token:", token)
        return None
    return Found(start, end, "password") if _accepted(content, to, quoted=quoted) else None


def _bare_end(text: str, to: _Assignment, start: int, end: int) -> int | None:
    """Return where an unquoted value ends; None: it is code or prose."""
    content = text[start:end]
    if to.how == "assign" and "=" in to.sign and " " not in to.sign and _ENV_NAME.fullmatch(to.name):
        whole = _ENV_VALUE.match(text, start)  # may include , ; & and brackets
        if whole is not None and not whole[0].startswith(("$(", "${")):
            end = whole.end()
            content = whole[0]
    elif text[end : end + 1] in ("(", "[") or text.startswith(("::", "=="), end):
        return None
    if to.how == "assign" and content.isalpha() and content.islower() and to.strength == PASSWORD:
        line = _REST_OF_LINE.match(text, start)
        words = line[0].split() if line else []
        plain = all(word.isalpha() and word.islower() for word in words)
        if line and plain and 4 <= len(words) <= 24 and WORDS["stop_words"].isdisjoint(words):
            return start + len(line[0].rstrip())  # a passphrase
        if len(words) > 1 and words[1].isalpha() and words[1].islower():
            return None
    if to.how == "assign" and _PROSE_LINE.match(text, start):
        return None
    end = start + len(text[start:end].rstrip(".:"))
    if end == start:  # only punctuation: `password=:{name}`
        return None
    return None if to.how == "assign" and _is_name(text[start:end]) else end


def _is_name(content: str) -> bool:
    """Return whether a value is a name in code: other_token, passwordField."""
    letters = content.replace("_", "").isalpha() and not content.isupper()
    return letters and ("_" in content or strength_of(content) != NO)


def _accepted(content: str, to: _Assignment, *, quoted: bool) -> bool:
    """Return whether a value is a secret, given its assignment."""
    if to.strength == IF_RANDOM:
        if to.how in ("loose", "mentioned"):
            return is_clear(content)
        return to.how in ("assign", "value") and " " not in content and is_random(content)
    if to.strength == IF_MIXED:
        if to.how in ("prose", "mentioned"):
            return is_clear(content)
        return " " not in content and (is_mixed(content) if to.how == "loose" else looks_secret(content))
    if to.how == "tag":
        sure = to.before in ("<", ":") or to.sign.startswith("</")
        return not harmless(content) if sure else looks_secret(content)
    if to.how in ("loose", "mentioned") and (is_clear(content) or (to.strength == TOKEN and is_long_word(content))):
        return True
    if to.how == "mentioned":
        return False
    if to.how == "loose":
        if not to.name.startswith("-"):
            compound = "_" in to.name or "|" in to.sign or _ENV_NAME.fullmatch(to.name) is not None
            return compound and likely(content, to.strength)
        if content.startswith("-") or harmless(content):
            return False
        return quoted or to.strength == PASSWORD or not content.isalpha()
    if to.how == "prose":
        explicit = quoted or ":" in to.sign
        return " " not in content and len(content) > 7 and (is_mixed(content) if explicit else is_clear(content))
    if to.how == "value" and ("text" in to.sign or "content" in to.sign):
        return " " not in content and likely(content, to.strength)
    if to.how == "list":
        return (to.name.startswith("-") and not harmless(content)) or likely(content, to.strength)
    if harmless(content):
        return False
    lower = not quoted and content.isalpha() and content.islower()
    if to.strength == TOKEN:
        return not DATE_OR_NUMBER.fullmatch(content) and not (lower and len(content) < 12)
    return not (lower and to.name.lower() in ("pw", "pwd", "pass"))


# -- several values, and values that do not follow their names

_NEXT_ITEM: Final = pattern(r"(?&quote) [ \t]{0,4}+ , [ \t\r\n]{0,40}+ (?&quoted)")


def _items(text: str, to: _Assignment, value: re.Match[str]) -> Iterator[Found]:
    """Yield the further items of a list of secrets: "tokens": ["a", "b"]."""
    item: re.Match[str] | None = value
    while item and (item := _NEXT_ITEM.match(text, item.end("quoted"))):
        if _accepted(item["quoted"], to, quoted=True):
            yield Found(*item.span("quoted"), "password")


_MEMBER: Final = pattern(
    r"""
    [\s,;]{0,60}+ (?&string_quote)?+ (?P<name>[A-Za-z0-9_.@/-]{1,80}+) (?&string_quote)?+
    [ \t]{0,8}+ (?: => | [:=] ) [ \t]{0,8}+                         # "name": value   name => value
    (?: (?&quoted) (?P=escapes) (?P=quote) | (?P<bare> [^\s"'`,;{}\[\]]{1,200}+ ) )
    """
)


def _nested(text: str, to: _Assignment, place: int) -> Iterator[Found]:
    """Yield the secrets in an object: "passwords": {"admin": "a1b2c3"}, "DB_PASSWORD": {"value": "x"}."""
    if to.strength == IF_RANDOM:
        return
    for _ in range(50):  # members
        member = _MEMBER.match(text, place)
        if member is None:
            return
        place = member.end()
        group = "quoted" if member["quoted"] is not None else "bare"
        value = member[group]
        sure = group == "quoted" and member["name"].lower() in VALUE_MEMBERS and is_given(value, to.strength)
        if sure or (likely(value, to.strength) and " " not in value):
            yield Found(*member.span(group), "password")


_VALUE_FIRST: Final = pattern(
    r"""
    (?: value | text ) (?&quote)? [ \t]{0,4}+ [:=] [ \t]{0,4}+
    (?: (?&quoted) (?P=escapes) (?P=quote) | (?P<bare> [^\s"'`=:,;{}\[\]<>]{1,200}+ ) )
    [ \t]{0,4}+ [,;]?+ (?&blanks) (?&quote)?+
    (?: name | key | header | variable | field | env | param )
    (?&quote)?+ [ \t]{0,4}+ [:=] [ \t]{0,4}+ (?&quote)?+ (?P<name>[a-z0-9_.-]{2,64}+)
    """
)


def _values_before_names(text: str, lowered: str) -> Iterator[Found]:
    """Yield the secrets whose names follow: "value": "x", "name": "DB_PASSWORD"."""
    if "value" not in lowered and "text" not in lowered:
        return
    for match in _VALUE_FIRST.finditer(lowered):
        span = match.span("quoted" if match["quoted"] is not None else "bare")
        strength = strength_of(text[slice(*match.span("name"))])
        value = text[slice(*span)]
        judge = likely if match[0].startswith("text") else is_given
        if strength > IF_RANDOM and judge(value, strength):
            yield Found(*span, "password")


_CELL: Final = re.compile(r"[^|,;\t]+")
_COLUMN_NAME: Final = re.compile(r"[\s\"'`*]{0,40}[A-Za-z][A-Za-z0-9_ .-]{0,40}[\s\"'`*]{0,40}")
_RULE_OF_TABLE: Final = re.compile(r"[-+|:=\s]*")
_AROUND_CELL: Final = " \"'`*\r"


def _below(text: str, headers: list[int]) -> Iterator[Found]:
    """Yield the values in the columns of tables whose headers name secrets, as in Markdown, CSV and tab-separated text.

    `headers`: the places of names without a value.
    """
    place = 0
    for header in headers:
        if header < place:
            continue
        begin = max(place, text.rfind("\n", place, header) + 1)
        place = _line_end(text, header)
        columns = _columns(text[begin:place]) if place - begin <= 400 else []
        while columns and place < len(text):
            begin, end = place + 1, _line_end(text, place + 1)
            line = text[begin:end]
            cells = [] if _RULE_OF_TABLE.fullmatch(line) else list(_CELL.finditer(line))
            if not (line and len(cells) in (0, len(columns))):
                break
            place = end
            for strength, cell in zip(columns, cells, strict=False):
                value = cell[0].strip(_AROUND_CELL)
                if strength > IF_RANDOM and " " not in value and likely(value, strength):
                    first = begin + cell.start() + cell[0].index(value)
                    yield Found(first, first + len(value), "password")


def _line_end(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _columns(line: str) -> list[int]:
    """Return the strengths of a table's columns; empty: the line is not a header with the name of a secret."""
    names = _CELL.findall(line)
    if not re.search(r"[|,;\t]", line) or not all(map(_COLUMN_NAME.fullmatch, names)):
        return []
    strengths = [strength_of(name.strip(_AROUND_CELL)) for name in names]
    return strengths if max(strengths) > IF_RANDOM else []


# -- special forms that give the name and the value

_INSERT: Final = pattern(
    r"""
    (?: insert | replace ) \s{1,8} (?: ignore\s{1,8} )? into\s{1,8}
    [\w.`"\[\]]{1,100}+ \s{0,8} \( (?P<columns> [^()]{1,1000}+ ) \) \s{0,8}     # the table and its columns
    values\s{0,8} (?=\()
    """
)
_ROW: Final = pattern(
    r"""
    \s{0,8} ,? \s{0,8}
    \( (?P<row> (?:
        [^()'"]++
      | '(?: [^'\\\n] | \\. )*+'                                    # 'it\'s'   'it''s', as two
      | "[^"\n]*+"
      | \([^()]{0,100}\)                                            # now()
    )*+ ) \)
    """
)
_ITEM: Final = pattern(
    r"""
    \s*+
    (?: '(?P<one> (?: [^'\\] | '' | \\. )*+ )' | "(?P<two> [^"]*+ )" | (?: [^,'"(] | \([^()]*+\) )++ )
    \s*+ (?:,|$)
    """
)


def _inserts(text: str, lowered: str) -> Iterator[Found]:
    """Yield the values of secret columns: insert into users (name, password) values ('a', 'x')."""
    for match in _INSERT.finditer(lowered):
        columns = [column.strip(" \n\t`\"[]'") for column in text[slice(*match.span("columns"))].split(",")]
        wanted = {number: found for number, column in enumerate(columns) if (found := strength_of(column)) > IF_RANDOM}
        place = match.end()
        while wanted and (row := _ROW.match(text, place)) is not None:
            place = row.end()
            for number, item in enumerate(_ITEM.finditer(text, *row.span("row"))):
                group = "one" if item["one"] is not None else "two"
                if number in wanted and item[group] and is_given(item[group], wanted[number]):
                    yield Found(*item.span(group), "password")


_SECRET_KIND: Final = re.compile(r"kind:[ ]{0,4}[\"']?Secret\b")
_SECRET_DATA: Final = re.compile(r"\n[ ]{0,8}(?:stringData|data):[ ]{0,8}\n")
_YAML_LINE: Final = pattern(
    r"""
    [ ]{1,20} [\w.-]{1,80}: [ ]{1,4}
    ["']? (?P<secret> [^\s"'|>][^\n"']{2,4000}+ ) ["']? (?:\n|$)
    """
)


def _kubernetes(text: str, _lowered: str) -> Iterator[Found]:
    """Yield the values of a Secret of Kubernetes, whatever their names are."""
    done = 0
    for kind in _SECRET_KIND.finditer(text):
        if kind.start() < done:
            continue
        done = kind.end() + 3000
        data = _SECRET_DATA.search(text, kind.end(), done)
        if data is None:
            continue
        place = data.end()
        while line := _YAML_LINE.match(text, place):
            place = line.end()
            if not harmless(line["secret"]):
                yield Found(*line.span("secret"), "password")


ASSIGNED: Final = (
    Rule(ANY_STEM, assigned_secrets),
    Rule(r"into\s", _inserts),
    Rule("kind:", _kubernetes),
    *rules_of("assigned"),
)
