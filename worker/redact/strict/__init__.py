"""The strict rules of redaction: where a text holds secrets that the reference's patterns miss.

A text takes these passes (`documents.py` calls them):

1. The reference's patterns put their markers.
2. The text is read without disguises and escapes (fold.py); the reference's patterns look once more.
3. One automaton looks for the hints of all rules; those whose hints are there look at the text, in the order of _RULES
   (find.py): what says by its form that it is a secret (forms.py), headers, URLs and protocols (requests.py), values
   that are assigned to a name (assigned.py), commands and calls (commands.py), what a text tells of in words (told.py),
   numbers of persons (forms.py), and what the reference left behind its markers. Names and values are judged in
   names.py.
4. Places that overlap become one marker in the original text (markers.py).
5. All of this again, until the text stays: markers show what stands behind or between them.

Of a document, members whose values are secrets as a whole are found besides (members.py).
"""
