"""The peers' protocol: one JSON object a line, a request with `do` and arguments in, a reply with results or `error` out."""

import json
import time
import traceback


def memory():
    """Resident bytes of this process, now and at most."""
    found = {}
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(("VmRSS", "VmHWM")):
                found[line.split(":")[0]] = int(line.split()[1]) * 1024
    return {"resident": found["VmRSS"], "peak": found["VmHWM"]}


def answer(engine, request):
    """The reply to one request."""
    do = request["do"]
    if do == "prefill":
        seconds, token = engine.prefill(request["ids"])
        return {"seconds": seconds, "token": int(token), **getattr(engine, "extra", {})}
    if do == "hold":
        engine.hold(request["name"], request["prompts"])
        return {}
    if do == "decode":
        steps, ids = engine.decode(request["name"], request.get("prompts"), request["new"])
        return {"steps": steps, "ids": [[int(i) for i in row] for row in ids], **getattr(engine, "extra", {})}
    if do == "logits":
        import numpy as np

        rows = engine.logits(request["ids"], request["phase"])
        np.save(request["path"], rows)
        return {"rows": len(rows)}
    if do == "parts":
        return {"parts": engine.parts(request["ids"])}
    if do == "threads":
        engine.set_threads(request["count"])
        return {}
    if do == "memory":
        return memory()
    raise ValueError(f"unknown request {do!r}")


def serve(make, name, config, lines, out):
    """Loads the engine, then answers line by line until the input ends or says quit."""

    def say(reply):
        out.write(json.dumps(reply) + "\n")
        out.flush()

    try:
        start = time.perf_counter()
        engine_type = make(name)
        imported = time.perf_counter()
        before = memory()["resident"]
        engine = engine_type(config)
        loaded = time.perf_counter()
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    times = {"import_seconds": imported - start, "load_seconds": loaded - imported, "resident_before": before}
    offers = {"holds": engine.holds, "threads": hasattr(engine, "set_threads"), "logits": hasattr(engine, "logits")}
    say({"info": engine.info(), **offers, **times, **memory()})
    for line in lines:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        try:
            say(answer(engine, request))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
