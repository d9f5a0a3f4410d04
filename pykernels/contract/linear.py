"""Linear layers over dense or packed weights, and rows of a packed embedding.

A packed weight is one flat uint8 tensor. `plain` is the canonical byte order; `rows16` permutes it for SIMD lanes: rows
padded with zeros to a multiple of 16, row blocks of 16 rows one after another. Per format, plain, then one row block:

float32            plain   [n, k] row-major
                   rows16  [k][16]
bfloat16, float16  plain   [n, k] row-major
                   rows16  [k / 2][16][2]; with odd k the last column stands alone as [16]
int8               plain   [n, k] codes, then [n] float32 scales; real = code x scale
                   rows16  [16] scales, then unsigned codes (code + 128) [k / 32][8][16][4], then the k % 32 left
                           columns as [left][16]
fp8_e4m3           plain   [n, k] codes, then [n] float32 scales; real = code x scale
                   rows16  [16] scales, then [k][16] codes
q4_0               plain   GGUF: per 32 columns float16 d, 16 bytes (low nibble column j, high j + 16); real = d (q - 8)
                   rows16  per 32 columns [16] d, [4][16][4] bytes: (j, row, i) holds columns 4j + i, 16 + 4j + i
q4_1               plain   GGUF: float16 d, float16 m, 16 bytes; real = d q + m
                   rows16  as q4_0 with [16] m after [16] d
q8_0               plain   GGUF: float16 d, 32 int8; real = d q
                   rows16  per pair of blocks [16] d, [16] d, then 2 x [8][16][4] unsigned codes (code + 128), so that
                           codes begin on 64-byte lines; an odd last block is [16] d, [8][16][4]

With `activations="int8"` each group of 32 columns of x is quantised first: scale = amax / 127, code = rint(x * (127 /
amax)), float32 throughout, all-zero groups have scale 0; products of codes are summed in integers, groups in float32.
"int16" is the same with 127 x 254 in the place of 127, so that a code is two of 8 bits, high x 254 + low: twice the
integer products, for inputs whose error reaches attention scores or logits directly.
"""

from __future__ import annotations

from .attention import tensor_bytes
from .schema import FLOATS, INDICES, U8, Args, Cost, Dims, Op, Rule, Scalar, Tensor

FORMATS = ("dense", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "q4_0", "q4_1", "q8_0")
LAYOUTS = ("plain", "rows16")
BLOCK = 32  # columns that share a scale in the block formats

# Bytes of one row of k columns in each packed format; rows16 only permutes these bytes (and pads the rows to 16).
ROW_BYTES = {
    "float32": lambda k: 4 * k,
    "bfloat16": lambda k: 2 * k,
    "float16": lambda k: 2 * k,
    "int8": lambda k: k + 4,
    "fp8_e4m3": lambda k: k + 4,
    "q4_0": lambda k: k // BLOCK * 18,
    "q4_1": lambda k: k // BLOCK * 20,
    "q8_0": lambda k: k // BLOCK * 34,
}
BLOCKED = ("q4_0", "q4_1", "q8_0")


def packed_bytes(weight_format: str, out_features: int, in_features: int) -> int:
    """Bytes that hold a weight `[out_features, in_features]` in a packed format (rows16 pads the rows to 16)."""
    return out_features * ROW_BYTES[weight_format](in_features)


def _weight_bytes(args: Args) -> float:
    return float(args["weight"].numel() * args["weight"].element_size())


def _linear_cost(dims: Dims, args: Args) -> Cost:
    if dims["tokens"] == 0:  # the weight is not read
        return Cost(0.0, 0.0)
    flops = 2.0 * dims["tokens"] * dims["in_features"] * dims["out_features"]
    return Cost(flops, _weight_bytes(args) + tensor_bytes(args, ("x", "bias", "residual", "out")))


def _embedding_cost(dims: Dims, args: Args) -> Cost:
    row = _weight_bytes(args) / max(args["num_embeddings"], 1)
    return Cost(float(dims["tokens"] * dims["hidden"]), dims["tokens"] * row + tensor_bytes(args, ("ids", "out")))


def _weight_size(rows: int, columns: int, args: Args) -> bool:
    weight, weight_format = args["weight"], args["weight_format"]
    if weight_format == "dense":
        return weight.dtype in FLOATS and tuple(weight.shape) == (rows, columns) and weight.stride(-1) == 1
    if weight_format in BLOCKED and columns % BLOCK:
        return False
    padded = rows if args["layout"] == "plain" else -(-rows // 16) * 16
    return weight.dim() == 1 and weight.numel() == packed_bytes(weight_format, padded, columns)


_WEIGHT_TEXT = (
    "weight must be [{rows}, {columns}] floats (dense), or exactly the bytes of a packed [{rows}, {columns}] "
    "weight of format {{weight_format}} and layout {{layout}} (block formats need columns in multiples of 32)"
)

LINEAR = Op(
    name="linear",
    family="linear",
    args=(
        Tensor("x", "tokens in_features", FLOATS),
        Tensor("weight", "out_features in_features | packed_bytes", FLOATS + U8),
        Scalar("weight_format", str, choices=FORMATS),
        Scalar("layout", str, choices=LAYOUTS),
        Scalar("activations", str, choices=("float", "int8", "int16")),
        Tensor("bias", "out_features", FLOATS, optional=True),
        Tensor("residual", "tokens out_features", FLOATS, optional=True),
        Tensor("out", "tokens out_features", FLOATS, role="out", out_dtype="x"),
    ),
    rules=(
        Rule(
            lambda d, a: _weight_size(d["out_features"], d["in_features"], a),
            _WEIGHT_TEXT.format(rows="{out_features}", columns="{in_features}"),
        ),
        Rule(
            lambda d, a: (
                a["activations"] == "float" or (a["weight_format"] != "dense" and d["in_features"] % BLOCK == 0)
            ),
            "{activations} activations need a packed weight and in_features ({in_features}) in multiples of 32",
        ),
    ),
    cost=_linear_cost,
)

EMBEDDING = Op(
    name="embedding",
    family="linear",
    args=(
        Tensor("ids", "tokens", INDICES),
        Tensor("weight", "num_embeddings hidden | packed_bytes", FLOATS + U8),
        Scalar("num_embeddings", int, minimum=1),
        Scalar("weight_format", str, choices=FORMATS),
        Scalar("layout", str, choices=LAYOUTS),
        Tensor("out", "tokens hidden", FLOATS, role="out"),
    ),
    rules=(
        Rule(
            lambda d, a: _weight_size(a["num_embeddings"], d["hidden"], a),
            _WEIGHT_TEXT.format(rows="{num_embeddings}", columns="{hidden}"),
        ),
    ),
    cost=_embedding_cost,
)
