"""How the command line talks with a running agent: a unix socket for root, JSON lines.

A request is one line, `{"command": "status", "arguments": {}}`; its answer is one line, `{"data": …}` or
`{"error": "a sentence", "exit": 1}`, where exit is the code the command line ends with (1: the answer is no, 2: used wrongly).
"""

from __future__ import annotations

REQUEST_BYTES_MAX = 16 << 20  # `attach` has the texts of its policies in it; answers have no bound, root asked for them


class ControlError(Exception):
    """A request that is answered with a sentence instead of data; exit_code: 1 is a no, 2 a wrong use."""

    def __init__(self, sentence: str, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit_code = exit_code
