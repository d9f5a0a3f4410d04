"""What every op means, in plain PyTorch: the specification that each backend is checked against.

One file per family, one function per op, keyword arguments named as in the op's declaration (its inputs and the tensors
that it updates). Pure outputs come back as a tuple in the order of the declaration, updated tensors are written in
place. `compute_dtype=torch.float64` is the oracle. With the input's dtype the same formula runs as a good kernel would
run it: operands in that dtype, sums in float32, each result rounded once. Readable before fast; nothing here is shared
with a kernel.
"""
