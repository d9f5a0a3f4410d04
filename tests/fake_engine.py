"""A worker that computes nothing: `python tests/fake_engine.py ENGINE CONFIG` speaks the peers' protocol.

Its "model" follows the committed teacher's greedy texts. Environment FAKE: JSON, engine -> what is wrong with it.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "peers" / "worker"))
from protocol import serve

HERE = Path(__file__).parent
LOG = os.environ.get("FAKE_LOG")


class Fake:
    def __init__(self, config):
        self.fault = json.loads(os.environ.get("FAKE", "{}")).get(sys.argv[1], "")
        if self.fault == "cannot load":
            raise RuntimeError("the model is of another kind")
        cases = json.loads((HERE / "oracle" / "smollm2.json").read_text())["cases"]
        self.next = {}
        for case in cases:
            for step, token in enumerate(case["ids"]):
                self.next[tuple(case["prompt_ids"] + case["ids"][:step])] = token
        self.holds = self.fault != "holds nothing"
        self.held = {}

    def info(self):
        return {"version": "1.0"}

    def note(self, what):
        if LOG:
            with open(LOG, "a") as log:
                log.write(f"{sys.argv[1]} {what}\n")

    def token(self, ids):
        token = self.next.get(tuple(ids), 7)
        return token + 1 if self.fault == "wrong" else token

    def prefill(self, ids):
        self.note(f"prefill {len(ids)} {ids[:3]}")
        if self.fault == "dies" and tuple(ids) not in self.next:
            print("a wild pointer", file=sys.stderr, flush=True)
            os._exit(11)
        return 1e-3 * len(ids), self.token(ids)

    def hold(self, name, prompts):
        self.note(f"hold {name}")
        self.held[name] = prompts

    def decode(self, name, prompts, new):
        self.note(f"decode {name} {new}")
        rows = [list(p) for p in (prompts or self.held[name])]
        if self.fault == "one at a time" and len(rows) > 1:
            raise NotImplementedError("only one sequence at a time")
        made = []
        for row in rows:
            made.append([])
            for _ in range(new + 1):
                made[-1].append(self.token(row + made[-1]))
        return [1e-3] * new, made


if __name__ == "__main__":
    if os.environ.get("FAKE_SLOW"):
        time.sleep(float(os.environ["FAKE_SLOW"]))
    serve(lambda name: Fake, sys.argv[1], json.loads(sys.argv[2]), sys.stdin, sys.stdout)
