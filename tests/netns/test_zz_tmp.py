import time
from tests.netns.test_attach import *
def test_x(lab, agent):
    t=time.time()
    def lap(w):
        nonlocal t; print(w, round(time.time()-t,2)); t=time.time()
    with lease(agent, lab.client, labels={"run": "1"}, policies=[{"name": "--allow", "text": "a.test:443/tcp"}]) as held:
        lap("lease")
        ask(lab, "a.test"); lap("a")
        ask(lab, "evil.test"); lap("evil")
        held.fact(); lap("fact")
        connect(lab, DENIED); lap("connect")
        held.fact(); lap("fact")
        connect(lab,A); lap("conn")
        held.end(); lap("end")
    gone(agent,"ep1"); lap("gone")
