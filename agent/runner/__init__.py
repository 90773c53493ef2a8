"""`namegate run`: a command in a network of its own, with only these names reachable.

    shell ── runner ─────────────┬── the agent's control socket (the lease)
             │ signals, terminal  └── nft table (its owner: the socket of this process)
    ─ ─ ─ ─ ─│─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ a pid, a network and a mount namespace of its own
             └ init (pid 1) ── COMMAND ── …

Rule 1: everything of a run ends with a process. `init` ends with the runner (PR_SET_PDEATHSIG), all that runs in the pid
namespace with `init`, the network namespace with its last process, the veth pair with the namespace; the nft table with the
runner's netlink socket, the lease with its connection. Nobody has to tidy up, so nobody can fail to.
Rule 2: COMMAND starts when the programs are on the interface and its policies in force, not before.
Rule 3: what COMMAND can see of a terminal, of signals, of its user and of its environment is as without us, or is named in
docs/run.md. The runner says nothing on a terminal while COMMAND runs.
"""

from __future__ import annotations

# As env(1) and timeout(1) have them.
EXIT_OURS = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


class CannotRun(Exception):
    """COMMAND was not started; the sentence says why and what to do."""
