"""Secrets in prose: after a word for a secret in many languages, and in places given by a protocol or form.

A word for a secret is followed by its value directly (`Kennwort: x`), after a verb (`le mot de passe est x`), or after
a few more words. So no grammar is needed: the secret is the first of the next words that can only be a password or,
after a sign or a verb, one that may be.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from worker.redact.forms import rules_of
from worker.redact.markers import Found, Rule, most_names
from worker.redact.names import (
    DATA,
    PASSWORD,
    VALUE_MEMBERS,
    WORDS,
    harmless,
    is_mixed,
    labels_secret,
    likely,
    looks_secret,
    may_be,
    must_be,
)  # fmt: skip

_ENGLISH: Final = DATA["phrases"]["english"]
_WORDS: Final = DATA["phrases"]["other_languages"]
_UNSPACED: Final = DATA["phrases"]["unspaced"]
_TOKENS: Final = DATA["phrases"]["tokens"]

_CASED: Final = {
    form for word in (*_ENGLISH, *_WORDS, *_UNSPACED, *_TOKENS) for form in (word, word.upper(), word.capitalize())
}
_HINT: Final = "|".join(re.escape(form) for form in sorted(_CASED))


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the words, grouped by first letter: it tries nothing at any other character."""
    firsts: dict[str, list[str]] = {}
    for word in sorted(words, key=len, reverse=True):
        end = r"(?![a-z0-9_(])" if word in _ENGLISH else ""
        firsts.setdefault(word[0], []).append(word[1:] + end)
    spaced = (rf"{first}(?<![^\W_]{first})(?:{'|'.join(rests)})" for first, rests in firsts.items())
    return re.compile("|".join([*spaced, *_UNSPACED, *_TOKENS]))


_OF_SCRIPTS: Final = frozenset((*_UNSPACED, *_TOKENS))
_WORD: Final = _pattern((*_ENGLISH, *_WORDS))
_ASCII_WORD: Final = _pattern(filter(str.isascii, (*_ENGLISH, *_WORDS)))
_ENDING: Final = re.compile(r"[^\W\d_]{0,8}+(?![a-z0-9_(])")
_REST: Final = re.compile(r"[^\x00-\x7f\s\u2000-\u206f\u3000-\u303f]{0,20}+")
"""What follows such a word without a space: 已重置为, は, ใหม่ของฉันคือ. The value may follow at once."""
_OTHER_SCRIPT: Final = re.compile("[\u0e00-\u1fff\u3000-\uffef]")
"""It ends a value in ASCII: パスワードはxでした."""
_NEXT: Final = re.compile(
    r"(?P<gap>(?:[^\w\n\"'`<>$%&*+!?@#\\~^({\[]|->|=>|<-){0,8}(?:\n[ \t]{0,8})?)"
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\"'`\n]{1,100})(?P=quote)|(?P<bare>[^\s\"'`<>()\[\]{},;|:=]{1,100}+))"
)
_CANDIDATE: Final = re.compile("[0-9\"'`]|[A-Za-z][A-Z]")
"""Every value has one of these in it or around it."""
_GAP_END: Final = re.compile(r"[.;\n]")
_STRONG_GAP: Final = re.compile(r"[:=>\u2192|<]|(?<=[ ])-(?=[ ])")


def _after_words(text: str, lowered: str) -> Iterator[Found]:
    left, done = most_names(len(text)), 0
    for word in (_ASCII_WORD if lowered.isascii() else _WORD).finditer(lowered):
        left -= 1
        if left < 0:
            yield Found(word.start(), len(text), "password")
            return
        if word.start() < done:
            continue
        end, english = word.end(), word[0] in _ENGLISH
        if not english:
            ending = (_REST if word[0] in _OF_SCRIPTS else _ENDING).match(lowered, end)
            if ending is None:
                continue
            end = ending.end()
        ending_verb = not english and not text[end - 1].isascii() and end > word.end()
        span = _value_after(text, end, verb=ending_verb, english=english, word=word[0])
        if span is not None:
            done = span[1]
            yield Found(*span, "password")


def _value_after(text: str, place: int, *, verb: bool, english: bool, word: str) -> tuple[int, int] | None:
    """Return the place of the value after a word for a secret, which ends at `place`."""
    if not _CANDIDATE.search(text, place, place + 120):
        return None
    sign, script = False, word in _OF_SCRIPTS  # script: all words up to here are in that of the first
    for number in range(7):  # words
        match = _NEXT.match(text, place)
        if match is None:
            return None
        gap, quoted = match["gap"], match["quoted"]
        if number and _GAP_END.search(gap):
            return None
        sign = sign or (_STRONG_GAP.search(gap) is not None)
        group = "bare" if quoted is None else "quoted"
        start, end = match.span(group)
        value = match[group]
        if quoted is None:
            other = None if text.isascii() or not value[0].isascii() else _OTHER_SCRIPT.search(value)
            value = value[: other.start() if other else None].rstrip(".")
            end = start + len(value)
            if text[end : end + 1] in ("(", "[", "{"):
                return None
        near = verb or (sign and not (english and ":" in gap and number == 0))
        near = near or script or (not english and (number == 0 or (quoted is not None and not gap.strip(" :=,"))))
        near = near and (value.isascii() or word not in _OF_SCRIPTS)
        if near and (looks_secret(value) if word in _TOKENS else may_be(value, quoted=quoted is not None)):
            return start, end
        if must_be(value) and not (number and _NAME_AND_YEAR.fullmatch(value)):
            return start, end
        if english and number == 0 and value.lower() in WORDS["follow_ups"]:
            return None
        passed = text[start:end].lower()
        verb = passed in WORDS["verbs"] or (verb and passed in WORDS["fillers"])
        script = script and not text[start].isascii()
        if _NO_WORD.search(value):
            return None
        place = match.end()
        sign = text[place : place + 1] in (":", "=")
    return None


_NAME_AND_YEAR: Final = re.compile("[A-Z][a-z]+[0-9]{1,4}")
_NO_WORD: Final = re.compile(r"\d|[!-&*+./@\[-`{-~]")


_REVERSED: Final = re.compile(
    r"[ ](?<=[^\s,;:][ ])(?:as|is)[ ](?:the|my|your|our|his|her|a|its)[ ](?:[a-z]{1,12}[ ]){0,2}"
    r"(?:password|passphrase|passcode|verification code|pin)(?![\w-]|[ ](?:manager|field|policy|owner|column|name))",
    re.IGNORECASE,
)
_BEFORE: Final = re.compile(r"(?:\A|(?<=[\s\"'`(]))(?P<secret>[^\s\"'`()<>,;:]{6,64}+)[\"'`]?\Z")
_CODE: Final = re.compile("(?:[A-Z]-)?[0-9]{4,8}")


def _before_words(text: str, _lowered: str) -> Iterator[Found]:
    for match in _REVERSED.finditer(text):
        begin = max(0, match.start() - 66)
        words = text[begin : match.start()].rsplit(None, 1)
        before = _BEFORE.search(text, match.start() - len(words[-1]), match.start()) if words else None
        if before and (may_be(before["secret"], quoted=False) or _CODE.fullmatch(before["secret"])):
            yield Found(*before.span("secret"), "password")


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
    """Return whether a field next to the label of a password field holds a password."""
    if " " in value.strip() or harmless(value):
        return False
    return likely(value, PASSWORD) or (name.lower() in ("value", "val") and len(value) >= 4 and not value.istitle())


_SEED_HINT: Final = re.compile(r"seed|mnemonic|recovery|backup phrase|wallet|secret phrase|(?:12|24)[ -]words?")
_SEED: Final = re.compile(
    r"(?<![a-z])[a-z]{3,8}(?:[\s,\"'\]]{1,4}(?:[0-9]{1,2}[.):]?[ ]{0,2})?[\"']?[a-z]{3,8}){11,23}+(?![a-z])"
)
_NO_SEED: Final = re.compile(
    r"\b(?:the|and|with|for|your|are|was|has|not|but|which|from|into|will|must|they|have|its)\b"
)


def _seeds(text: str, lowered: str) -> Iterator[Found]:
    done = 0
    for hint in _SEED_HINT.finditer(lowered):
        if hint.start() < done:
            continue
        done = hint.end() + 60
        place = hint.end()
        for _ in range(6):
            phrase = _SEED.search(text, place, hint.end() + 500)
            if phrase is None or phrase.start() > hint.end() + 200:
                break
            words = _NO_SEED.search(phrase[0])
            if words is None:
                yield Found(phrase.start(), phrase.end(), "password")
                done = phrase.end()
                break
            place = phrase.start() + words.end()


_LABEL: Final = (
    r"(?:passw(?:or)?d|passphrase|passcode|passwort|kennwort|mot de passe|contrase\S{1,2}a|senha|secret(?:[ _-]key)?"
    r"|(?:api|access|private)[ _-]?key|(?:access|auth|api|bearer|refresh)[ _-]token|token:"
    r"|密码|密碼|パスワード|비밀번호)[ \t\"*`_)]{0,4}:?[*_ \t]{0,4}\r?\n"
)
"""The name of a secret at the end of a line."""
_LABEL_HINT: Final = _LABEL.replace(r"\S", ".")
_BELOW: Final = re.compile(
    rf"(?i:{_LABEL})(?P<between>"
    r"(?:[ \t]*(?:[-=~_*]{3,20}|`{3,8}\w{0,12}|\[REDACTED:password\])?[ \t]*\r?\n){0,2})"
    r"[ \t]{0,20}(?:[-*>$][ ])?[\"'`]?(?P<secret>[^\s\"'`<>|(){}]{6,300}+)[\"'`]?[ \t]*(?=\r?\n|\Z)"
)


def _below_labels(text: str, _lowered: str) -> Iterator[Found]:
    """Yield the values that stand alone in a line below the name of a secret, also below a blank line or a rule."""
    for match in _BELOW.finditer(text):
        # the reference takes a rule for the value
        if is_mixed(match["secret"]) or ("[" not in match["between"] and may_be(match["secret"], quoted=False)):
            yield Found(*match.span("secret"), "password")


IN_PROSE: Final = (
    Rule(_HINT, _after_words),
    Rule("password|passphrase|passcode|verification code|pin", _before_words),
    Rule("passw|kennwort|passphrase|passcode|api[ _-]?key|mot de passe|contrase|senha|wachtwoord"
        "|senord|has(?:ł|Ł)o|heslo"
        "|secret key|арол|密码|密碼|パスワード|비밀번호|ifre", _fields),
    Rule("seed|mnemonic|recovery|backup phrase|wallet|secret phrase|(?:12|24)[ -]word", _seeds),
    *rules_of("prose"),
    Rule(_LABEL_HINT, _below_labels),
)  # fmt: skip
