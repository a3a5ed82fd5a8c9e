"""Small kernels for the tests: one feature or one fault each.  No annotations postponed: Triton reads them."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

SCALE = tl.constexpr(3)


@triton.jit
def copy_masked(src, dst, n, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if OTHER:
        x = tl.load(src + offs, mask=offs < n, other=0)
    else:
        x = tl.load(src + offs, mask=offs < n)
    tl.store(dst + offs, x, mask=offs < n)


@triton.jit
def copy_range(src, dst, start, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(src + start + offs, mask=offs < n, other=0)
    tl.store(dst + offs, x, mask=offs < n)


@triton.jit
def store_range(dst, start, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(dst + start + offs, offs, mask=offs < n)


@triton.jit
def load_one(src, dst, at):
    tl.store(dst, tl.load(src + at))


@triton.jit
def int_ops(a, b, out, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(a + offs, mask=mask, other=1)
    y = tl.load(b + offs, mask=mask, other=1)
    tl.store(out + offs, x // y, mask=mask)
    tl.store(out + n + offs, x % y, mask=mask)
    tl.store(out + 2 * n + offs, x * y, mask=mask)
    tl.store(out + 3 * n + offs, x + y - (x << 3) + (x >> 1), mask=mask)
    tl.store(out + 4 * n + offs, (x & y) | (x ^ 5), mask=mask)
    tl.store(out + 5 * n + offs, tl.minimum(x, y) + tl.maximum(x, 7) + tl.where(x > y, x, 2), mask=mask)


@triton.jit
def mixed_types(i32, i64, u32, f16, f32, b, out, k, s):
    o = tl.arange(0, 8)
    i, j, u = tl.load(i32 + o), tl.load(i64 + o), tl.load(u32 + o)
    h, f, c = tl.load(f16 + o), tl.load(f32 + o), tl.load(b + o)
    tl.store(out + o, i * f)
    tl.store(out + 8 + o, i * 0.1)
    tl.store(out + 16 + o, i + u)
    tl.store(out + 24 + o, j * f + h)
    tl.store(out + 32 + o, i / 7)
    tl.store(out + 40 + o, h * i + h * 2)
    tl.store(out + 48 + o, c + 1)
    tl.store(out + 56 + o, (c & (i > 2)) * f)
    tl.store(out + 64 + o, j // k + j % k)
    tl.store(out + 72 + o, f * s + f / h)
    tl.store(out + 80 + o, (i > u).to(tl.int32) + c.to(tl.int8))
    tl.store(out + 88 + o, f.to(tl.int32) + f.to(tl.float16))
    n = 7
    n = n // -2
    tl.store(out + 96 + o, n * i + (-n) % 3)


@triton.jit
def helper(x, factor: tl.constexpr = SCALE, extra=2):
    if factor > 2:
        return x * factor + extra, x
    return x, x


@triton.jit
def control(src, out, n, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    total = 0
    for i in range(n):
        value = tl.load(src + i)
        if value % 2 == 0:
            total += value
        elif 3 <= value < 8:
            total -= value
        else:
            continue
    i = 0
    while (i < n) & (total < 100):
        i += 1
        total += i
    for j in tl.static_range(3):
        total += j * SCALE
    a, b = helper(total)
    c, d = helper(a, 1)
    flag = 5 if FLAG and n > 2 else 9
    SIZE: tl.constexpr = BLOCK * 2
    o = tl.arange(0, SIZE)
    tl.store(out + o, a + b + c * d + flag + o)
    if n > 1000:
        return
    tl.store(out + SIZE, tl.cdiv(n, 4) + tl.num_programs(0))


@triton.jit
def combine_max(a, ia, b, ib):
    keep = (a > b) | ((a == b) & (ia < ib))
    return tl.where(keep, a, b), tl.where(keep, ia, ib)


@triton.jit
def combine_add(a, b):
    return a + b


@triton.jit
def reductions(x, out, ints, M: tl.constexpr, N: tl.constexpr):
    r, c = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + r[:, None] * N + c[None, :])
    k = tl.load(ints + r[:, None] * N + c[None, :])
    tl.store(out + r, tl.sum(v, 1))
    tl.store(out + M + r, tl.max(v, axis=1))
    tl.store(out + 2 * M + r, tl.argmax(v, axis=1))
    tl.store(out + 3 * M + r, tl.min(k, axis=1))
    tl.store(out + 4 * M + r, tl.sum(k > 3, axis=1))
    tl.store(out + 5 * M + r, tl.sum(tl.cumsum(k, 1), axis=1))
    best, at = tl.max(v, axis=1, return_indices=True)
    tl.store(out + 6 * M + r, best + at)
    top, where = tl.reduce((v, c[None, :] + k * 0), 1, combine_max)
    tl.store(out + 7 * M + r, top + where)
    tl.store(out + 8 * M + r, tl.sum(tl.associative_scan(v, 1, combine_add), 1))
    tl.store(out + 9 * M + r, tl.sum(tl.dot(v, tl.trans(v)), 1) + tl.sum(v))
    tl.store(out + 10 * M + r, tl.sum(tl.sort(v) * c[None, :], 1) + tl.sum(tl.exp(v) * tl.sigmoid(v), 1))
    tl.store(out + 11 * M + r, tl.xor_sum(k, 1) + tl.argmin(k, 1))
    tl.store(out + 12 * M + r, tl.sum(tl.flip(v) * c[None, :], 1) + tl.sqrt(tl.abs(tl.sum(v, 1))))


@triton.jit
def atomics(counter, hist, data, out, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    ticket = tl.atomic_add(counter, 1)
    tl.store(out + pid, ticket)
    tl.atomic_max(counter + 1, pid * 3)
    tl.atomic_xchg(counter + 2, pid)
    tl.atomic_cas(counter + 3, 0, pid + 7)
    o = tl.arange(0, BLOCK)
    v = tl.load(data + o, mask=o < n, other=0)
    tl.atomic_add(hist + v, 1, mask=o < n)


@triton.jit
def race(out, n):
    pid = tl.program_id(0)
    tl.store(out + pid // 2, pid)


@triton.jit
def reads_its_neighbour(data, n):
    pid = tl.program_id(0)
    if pid + 1 < n:
        tl.store(data + pid, tl.load(data + pid + 1))


@triton.jit
def sum_undefined(src, dst, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(src + offs, mask=offs < n)
    tl.store(dst, tl.sum(x, 0))


@triton.jit
def branch_undefined(src, dst, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(src + offs, mask=offs < n)
    if tl.max(x, 0) > 1000:
        tl.store(dst, 1)


@triton.jit
def masked_away(src, dst, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(src + offs, mask=offs < n)
    y = tl.where(offs < n, x * 2, 0)
    tl.store(dst, tl.sum(y, 0))
    tl.store(dst + 1 + offs, x, mask=offs < n)


@triton.jit
def address_undefined(src, table, dst, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    at = tl.load(table + offs, mask=offs < n)
    tl.store(dst + offs, tl.load(src + at), mask=offs < n)


@triton.jit
def move_raw(addresses, dst_at, src_at, ROW: tl.constexpr):
    base = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    o = tl.arange(0, ROW)
    tl.store(base + dst_at * ROW + o, tl.load(base + src_at * ROW + o))


@triton.jit
def cast_bytes(src, dst, N: tl.constexpr):
    o = tl.arange(0, N)
    s = tl.cast(src, tl.pointer_type(tl.uint8))
    d = dst.to(tl.pointer_type(tl.uint8))
    tl.store(d + o, tl.load(s + o))


@triton.jit
def constants(out, n, FLAG: tl.constexpr, SIZE: tl.constexpr):
    if ~FLAG and SIZE - 7 // 2 > 0:
        tl.store(out, SIZE // -2 + SIZE % 3)
    SIZE = SIZE + n
    tl.store(out + 1, SIZE // -2 if not FLAG or SIZE > 4 else SIZE)


@triton.jit
def bits(src, dst):
    o = tl.arange(0, 8)
    tl.store(dst + o, tl.load(src + o).to(tl.int32, bitcast=True) + 1)


@triton.jit
def pointer_to_integer(src, dst, N: tl.constexpr):
    p = src.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(dst + tl.arange(0, N), tl.load(p + tl.arange(0, N)))


@triton.jit
def unsupported_late(src, dst, N: tl.constexpr):
    tl.store(dst, 1.0)
    p = src.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(dst + tl.arange(0, N), tl.load(p + tl.arange(0, N)))


@triton.jit
def double(src, dst, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(dst + o, tl.load(src + o) * 2)


@triton.jit
def softmax_rows(src, dst, lengths, scale, N: tl.constexpr):
    row = tl.program_id(0)
    n = tl.load(lengths + row)
    o = tl.arange(0, N)
    best = -float("inf")
    total = 0.0
    for start in range(0, n, N):
        x = tl.load(src + row * 4 * N + start + o, mask=start + o < n, other=-float("inf")) * scale
        new = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - new) + tl.sum(tl.exp(x - new), 0)
        best = new
    if n == 0:
        return
    tl.store(dst + row, best + tl.log(total))


@triton.jit
def products(a, b, out, n, D: tl.constexpr):
    pid = tl.program_id(0)
    i, j = tl.arange(0, D), tl.arange(0, D)
    x = tl.load(a + pid * D * D + i[:, None] * D + j[None, :])
    y = tl.load(b + i[:, None] * D + j[None, :], mask=i[:, None] < n, other=0.0)
    z = tl.dot(x, y.T) + tl.sum(x) + tl.sum(y, 1)[:, None] + tl.sum(x, 0)[None, :]
    z += tl.reshape(tl.broadcast_to(tl.expand_dims(i, 0), [D, D]), [D, D]) + tl.argmax(x, 1)[:, None]
    tl.store(out + pid * D * D + j[None, :] * D + i[:, None], tl.trans(tl.exp(z * 0.01)))


@triton.jit
def lists_of_slots(table, lengths, starts, dst, width, BLOCK: tl.constexpr):
    """A row's slots behind those of the rows before it: numbers alone, and a loop that is longer for some rows."""
    row = tl.program_id(0)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    for block in range(tl.cdiv(length, BLOCK)):
        offs = block * BLOCK + tl.arange(0, BLOCK)
        slots = tl.load(table + row * width + offs, mask=offs < length)
        tl.store(dst + start + offs, slots * 2 + row, mask=offs < length)
    if length == 0:
        tl.store(dst + start, -row)


@triton.jit
def stores_then_splits(dst, values, n, N: tl.constexpr):
    pid = tl.program_id(0)
    o = tl.arange(0, N)
    v = tl.load(dst + pid * N + o)
    tl.store(dst + pid * N + o, tl.exp(v * 0) + v)
    if tl.load(values + pid) > n:
        tl.store(dst + pid * N, tl.load(dst + pid * N) + 10)


@triton.jit
def brain_ops(a, b, f, narrow, wide, n, N: tl.constexpr):
    o = tl.arange(0, N)
    x, y = tl.load(a + o, mask=o < n, other=0.3), tl.load(b + o)
    z = tl.load(f + o)
    tl.store(narrow + o, x * y)
    tl.store(narrow + N + o, x + y)
    tl.store(narrow + 2 * N + o, 0.1 - x)
    tl.store(narrow + 3 * N + o, z)
    tl.store(narrow + 4 * N + o, tl.where(o < 3, x, y) * 3)
    tl.store(wide + o, x * z)
    tl.store(wide + N + o, x / y)
    tl.store(wide + 2 * N + o, tl.sum((x[:, None] * y[None, :]).to(tl.float32), 1))
    tl.store(wide + 3 * N + o, z.to(tl.bfloat16).to(tl.float32) - z)
    tl.store(wide + 4 * N + o, tl.sum(tl.dot(x[:, None] + tl.zeros([N, N], tl.bfloat16), tl.trans(y[:, None] * y[None, :])), 1))


@triton.jit
def brain_sine(src, dst, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(dst + o, tl.sin(tl.load(src + o)))


@triton.jit
def copy_window(src, dst, rows, columns, stride, at, PAD: tl.constexpr, CHECK: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The R x C window of src that begins at (at + R * program, 0), into dst of the same rows."""
    first = at + tl.program_id(0) * R
    ours = tl.make_block_ptr(src, (rows, columns), (stride, 1), (first, 0), (R, C), (1, 0))
    x = tl.load(ours, boundary_check=(0, 1) if CHECK else (1,), padding_option=PAD)
    theirs = tl.make_block_ptr(dst, (rows, columns), (columns, 1), (0, 0), (R, C), (1, 0))
    theirs = tl.advance(theirs, (first, 0))
    tl.store(theirs, (2 * x).to(theirs.dtype.element_ty), boundary_check=(0, 1))


@triton.jit
def widen_window(src, dst, rows, more, PAD: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """src of `rows` rows into dst, which has `more`."""
    ours = tl.make_block_ptr(src, (rows, C), (C, 1), (0, 0), (R, C), (1, 0))
    theirs = tl.make_block_ptr(dst, (more, C), (C, 1), (0, 0), (R, C), (1, 0))
    tl.store(theirs, tl.load(ours, boundary_check=(0,), padding_option=PAD), boundary_check=(0,))


@triton.jit
def hashes(seeds, small, out, N: tl.constexpr):
    """Bits of uint64 with signed ones, for which numpy has no type: Triton's is uint64."""
    at = tl.arange(0, N)
    seed = tl.load(seeds + at).to(tl.uint64)
    k = tl.load(small + at)
    h = 0
    h ^= seed
    h = h ^ k
    h = (h << 3) | (k & seed)
    h = (h >> 1) ^ (h << k.to(tl.int32))
    one = tl.load(seeds).to(tl.uint64)
    tl.store(out + at, h + (7 ^ one))


@triton.jit
def store_double(there, value):
    tl.store(there, value * 2)


@triton.jit
def store_by_another(read, written, counted, SIZE: tl.constexpr):
    place = written + SIZE
    store_double(place, tl.load(read))
    tl.atomic_add(counted, 1)


@triton.jit
def random_numbers(seeds, offsets, out, ints, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    seed = tl.load(seeds + tl.program_id(0))
    at = tl.load(offsets + o)
    begin = tl.program_id(0) * BLOCK
    tl.store(out + begin + o, tl.rand(seed, at))
    tl.store(ints + begin + o, tl.randint(seed, at))
    tl.store(out + tl.num_programs(0) * BLOCK + tl.program_id(0), tl.rand(seed, tl.program_id(0)))
    tl.store(ints + tl.num_programs(0) * BLOCK + tl.program_id(0), tl.to_tensor(7) + tl.to_tensor(at).to(tl.int32).max(0))


@triton.jit
def small_logarithms(values, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, libdevice.log1p(tl.load(values + o)))
