"""Small views of the agent's one stream of facts: lines for people, lines for Hubble's tools, a screen. Only read."""
