"""From what was seen to what would allow it: records of facts, policies made of them, a record judged by other policies."""
