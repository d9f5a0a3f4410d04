"""llama.cpp through llama-cpp-python's C interface, with flash attention. Config: "kv" ("f16", "bf16" or "q8_0")."""

import ctypes
import time

import llama_cpp as L
import numpy as np

BATCH, MICRO_BATCH = 2048, 512
TYPES = {"f16": 1, "q8_0": 8, "bf16": 30}
ROOM = 256  # tokens that a held prompt can be continued by


@L.llama_log_callback
def silent(level, text, user_data):
    pass


class Context:
    """One llama context. Cutting one far back is destructive, so that each held length has its own."""

    def __init__(self, model, vocab, config, threads, sequences, tokens):
        params = L.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * (-(-tokens // 256) * 256), sequences
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = 1
        else:
            params.flash_attn = True
        if hasattr(params, "kv_unified"):
            params.kv_unified = sequences == 1 or bool(config.get("unified"))
        params.type_k = params.type_v = TYPES[config["kv"]]
        self.pointer = L.llama_init_from_model(model, params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp made no context of {params.n_ctx} tokens")
        self.memory, self.vocab = L.llama_get_memory(self.pointer), vocab
        self.batch = L.llama_batch_init(BATCH, 0, 1)
        self.lengths, self.next = [0] * sequences, [0] * sequences

    def run(self, tokens):
        """Decodes (id, position, sequence, wants logits) tuples; returns the logits that were asked for."""
        batch, wanted = self.batch, []
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wants) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wants
            wanted += [i] if wants else []
        if code := L.llama_decode(self.pointer, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._logits(i) for i in wanted]

    def _logits(self, row):
        return np.ctypeslib.as_array(L.llama_get_logits_ith(self.pointer, row), shape=(self.vocab,))

    def fill(self, sequence, ids):
        """Computes a prompt and keeps the token that follows it."""
        for begin in range(0, len(ids), BATCH):
            part = ids[begin : begin + BATCH]
            last = begin + len(part) == len(ids)
            rows = self.run([(t, begin + i, sequence, last and i == len(part) - 1) for i, t in enumerate(part)])
        self.lengths[sequence], self.next[sequence] = len(ids), int(rows[0].argmax())

    def clear(self):
        L.llama_memory_clear(self.memory, False)

    def step(self, tokens, past):
        """One more token for every sequence, `past` after what is held."""
        rows = self.run([(t, n + past, s, True) for s, (t, n) in enumerate(zip(tokens, self.lengths))])  # noqa: B905
        return [int(row.argmax()) for row in rows]

    def rewind(self):
        for sequence, length in enumerate(self.lengths):
            if not L.llama_memory_seq_rm(self.memory, sequence, length, -1):
                raise RuntimeError("llama.cpp did not remove the tokens after a held prompt")


class Engine:
    holds = True

    def __init__(self, config):
        L.llama_log_set(silent, ctypes.c_void_p(0))
        L.llama_backend_init()
        self.config = config
        self.model = L.llama_model_load_from_file(config["model"].encode(), L.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp cannot read the model")
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.own, self.held, self.threads = None, {}, config["threads"]

    def _context(self, sequences, tokens):
        return Context(self.model, self.vocab, self.config, self.threads, sequences, tokens)

    def set_threads(self, count):
        self.threads = count
        for context in [*self.held.values(), *([self.own] if self.own else [])]:
            L.llama_set_n_threads(context.pointer, count, count)

    def info(self):
        system = L.llama_print_system_info().decode().strip()
        return {"version": L.__version__, "kv": self.config["kv"], "system": system}

    def prefill(self, ids):
        if self.own is None:
            self.own = self._context(1, self.config["context"])
        self.own.clear()
        start = time.perf_counter()
        self.own.fill(0, ids)
        return time.perf_counter() - start, self.own.next[0]

    def hold(self, name, prompts):
        context = self._context(len(prompts), max(map(len, prompts)) + ROOM)
        for sequence, ids in enumerate(prompts):
            context.fill(sequence, ids)
        self.held[name] = context

    def decode(self, name, prompts, new):
        if prompts is not None:
            self.hold(name, prompts)
        context, steps = self.held[name], []
        tokens = list(context.next)
        ids = [[t] for t in tokens]
        for past in range(new):
            start = time.perf_counter()
            tokens = context.step(tokens, past)
            steps.append(time.perf_counter() - start)
            for row, token in zip(ids, tokens):  # noqa: B905
                row.append(token)
        if prompts is None:
            context.rewind()
        else:
            L.llama_batch_free(context.batch)
            L.llama_free(self.held.pop(name).pointer)
        return steps, ids

    def logits(self, ids, phase):
        context = self._context(1, len(ids))
        width = BATCH if phase == "prefill" else 1
        rows = []
        for begin in range(0, len(ids), width):
            part = ids[begin : begin + width]
            rows += [row.copy() for row in context.run([(t, begin + i, 0, True) for i, t in enumerate(part)])]
        L.llama_batch_free(context.batch)
        L.llama_free(context.pointer)
        return np.stack(rows)
