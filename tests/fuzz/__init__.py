"""Fuzzing of the DNS walker and judge: `scripts/fuzz dns`.

corpus      messages to begin with: those of the cases, and messages of every kind as dnspython writes them
making      a stream of messages from a seed: built to lie, or of the corpus, and most of them damaged
reference   a slow reader that shares no code with the walker: the bound of what a reply may teach
judging     what must hold for a message whatever its octets are
comparing   agreement with dnspython, and the list of differences
"""
