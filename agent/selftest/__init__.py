"""`namegate selftest`: the gate proved on this host and kernel, in a network of its own, by captures of its own.

    client ── eth0 ═ ep0 ── [the agent] host ── up0 ═ eth0 ── internet: a name server, TCP and UDP
              ^ near                                     ^ far

Rule 1: everything is inside network namespaces made for it; the host's own interfaces, rules and settings are not touched.
Rule 2: nothing is believed that a capture did not see: what left the client (near) and what arrived on the internet (far).
Rule 3: it goes as it came, also when it is interrupted; what one that was killed left behind goes with the next.
"""
