"""The strict rules of redaction: they find secrets that the reference's patterns miss.

A text goes through these passes (called by `documents.py`):

1. The reference's patterns insert their markers.
2. Disguises and escapes are undone (fold.py), and the reference's patterns run again.
3. One automaton looks for the hints of all rules; the rules whose hints it finds read the text, in the order of _RULES
   (find.py): secrets recognisable by their form (forms.py), headers, URLs and protocols (requests.py), values assigned
   to a name (assigned.py), commands and calls (commands.py), secrets given away in prose (told.py), personal numbers
   (forms.py), and leftovers after the reference's markers. Names and values are judged in names.py.
4. Overlapping places become one marker in the original text (markers.py).
5. All of this repeats until the text no longer changes: markers reveal secrets after or between them.

In a document, members whose whole values are secrets are found too (members.py).
"""
