/* Attention and related operations for any mask, dtype and GPU: plain kernels without tensor cores.

   They compute blocks that cuDNN does not compute, and check cuDNN's results.  NVRTC (without any
   header) or nvcc compiles this file once per dtype and widths of heads with

     ELEMENT    dtype of q, k, v, out: 0 float16, 1 bfloat16, 2 float32, 3 float64
     HEADDIM    headdim (of q and k), rounded up to a multiple of 32
     HEADDIM_V  headdim_v (of v and out), rounded up likewise
     SOFTCAP    c: scaled logits s become c tanh(s / c); if undefined, there is no cap

   Tensors are token-major, (tokens, heads, headdim or headdim_v), and contiguous.  With `wide`, a
   result has the type Compute instead of Element.  With `fresh`, a result is overwritten instead of
   added to.

   A warp computes ROWS rows of one side (queries, or keys for dk and dv) at a time.  A panel is
   LANES rows of the other side, in shared memory.  A lane computes with one row of the panel, and
   then with every LANES-th element of the headdim.  No sums use atomics, so results repeat bit for
   bit. */

#if ELEMENT == 0 || ELEMENT == 1
struct Element {
  unsigned short bits;
};
typedef float Compute;
#elif ELEMENT == 2
typedef float Element;
typedef float Compute;
#else
typedef double Element;
typedef double Compute;
#endif

#define LANES 32
#define WARPS 4
#define ROWS 4                          /* rows of a warp */
#define THREADS (WARPS * LANES)
#define BLOCK_ROWS (WARPS * ROWS)       /* rows of a thread block */
/* Of a tensor whose heads have `D` elements: */
#define SHARE(D) ((D) / LANES)          /* elements of a row that a lane holds */
#define BATCH(D) (16 * SHARE(D) / (int)sizeof(Compute)) /* elements that a thread loads at once */
#define STRIDE(D) ((D) + 1)             /* of panel rows: lanes read a column without bank conflicts */
/* Loops are unrolled; otherwise the arrays of a thread would be in memory, not in registers. */
#define FOR_ROWS(r) _Pragma("unroll") for (int r = 0; r < ROWS; ++r)
#define FOR_ROWS_BELOW(r, end) FOR_ROWS(r) if (warp_first + r < (end))
#define FOR_SHARE(D, c) _Pragma("unroll") for (int c = 0; c < SHARE(D); ++c)
#define EVERYONE 0xffffffffu
#define MINUS_INFINITY ((Compute)__int_as_float(0xff800000))

union Bits {
  float value;
  unsigned int bits;
};
__device__ unsigned short bfloat16_of(float x) {
  Bits y;
  y.value = x;
  if (x != x) return 0x7fff; /* rounding could turn a NaN into an infinity */
  return (unsigned short)((y.bits + 0x7fff + ((y.bits >> 16) & 1)) >> 16); /* to even */
}

extern __shared__ double shared[]; /* BLOCK_ROWS rows of one or two tensors, and one panel */

#if ELEMENT == 0
__device__ Compute load(Element x) {
  float y;
#ifdef __CUDA_ARCH__
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
#else
  y = half_to_float(x.bits);
#endif
  return y;
}
__device__ Element narrow(Compute x) {
  Element y;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  y.bits = float_to_half(x);
#endif
  return y;
}
#elif ELEMENT == 1
__device__ Compute load(Element x) {
  Bits y;
  y.bits = (unsigned int)x.bits << 16;
  return y.value;
}
__device__ Element narrow(Compute x) {
  Element y;
  y.bits = bfloat16_of(x);
  return y;
}
#else
__device__ Compute load(Element x) { return x; }
__device__ Element narrow(Compute x) { return x; }
#endif

__device__ Compute get(const void *x, int wide, long long i) {
  return wide ? ((const Compute *)x)[i] : load(((const Element *)x)[i]);
}
__device__ void put(void *x, int wide, int fresh, long long i, Compute value) {
  if (!fresh) value += get(x, wide, i);
  if (wide)
    ((Compute *)x)[i] = value;
  else
    ((Element *)x)[i] = narrow(value);
}

/* Sums and maxima of each `lanes` neighbouring lanes, a power of two. */
template <class T>
__device__ T sum_of_warp(T x, int lanes = LANES) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(EVERYONE, x, step);
  return x;
}
__device__ Compute max_of_warp(Compute x, int lanes = LANES) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    Compute other = __shfl_xor_sync(EVERYONE, x, step);
    x = other > x ? other : x;
  }
  return x;
}

/* Load rows [first, first + rows) of one head, times a factor; zeros beyond `end` and the width.
   A thread loads BATCH elements at once, because each load waits for the L2 cache. */
template <int D>
__device__ void load_rows(Compute *to, int stride, int rows, const Element *x, int first, int end,
                          int head, int nheads, int width, Compute factor) {
  for (int i0 = threadIdx.x; i0 < rows * D; i0 += BATCH(D) * THREADS) {
    Compute values[BATCH(D)];
#pragma unroll
    for (int b = 0; b < BATCH(D); ++b) {
      int i = i0 + b * THREADS, row = first + i / D, d = i % D;
      values[b] = 0;
      if (row < end && d < width)
        values[b] = load(x[((long long)row * nheads + head) * width + d]);
    }
#pragma unroll
    for (int b = 0; b < BATCH(D); ++b) {
      int i = i0 + b * THREADS;
      to[i / D * stride + i % D] = values[b] * factor;
    }
  }
}

/* 1 if query `i` sees key `j`; ends: begins and ends of each interval, (2 intervals, nq). */
__device__ int sees(const int *ends, int intervals, int nq, int nk, int i, int j) {
  int seen = 0;
  for (int s = 0; s < intervals; ++s)
    seen |= ends[2 * s * (long long)nq + i] <= j && j < ends[(2 * s + 1) * (long long)nq + i];
  return seen && j < nk;
}
/* 1 if query `i` sees any key of [from, to). */
__device__ int meets(const int *ends, int intervals, int nq, int i, int from, int to) {
  int met = 0;
  for (int s = 0; s < intervals; ++s) {
    int begin = ends[2 * s * (long long)nq + i], end = ends[(2 * s + 1) * (long long)nq + i];
    met |= begin < to && from < end && begin < end;
  }
  return met;
}

/* The range [from, to) of whole panels that contains all visible keys of the thread block's queries. */
__device__ void hull(const int *ends, int intervals, int nq, int nk, int first, int *from,
                     int *to) {
  int least = nk, greatest = 0;
  for (int i = first; i < first + BLOCK_ROWS && i < nq; ++i)
    for (int s = 0; s < intervals; ++s) {
      int begin = ends[2 * s * (long long)nq + i], end = ends[(2 * s + 1) * (long long)nq + i];
      if (begin < end && begin < least) least = begin;
      if (begin < end && end > greatest) greatest = end;
    }
  *from = least < 0 ? 0 : least / LANES * LANES;
  *to = greatest < nk ? greatest : nk;
}

#ifdef SOFTCAP
#define CAP ((Compute)(SOFTCAP))
__device__ Compute capped(Compute s) { return CAP * tanh(s / CAP); }
/* The derivative, of the capped logit. */
__device__ Compute slope(Compute s) { return 1 - s / CAP * (s / CAP); }
#else
__device__ Compute capped(Compute s) { return s; }
__device__ Compute slope(Compute) { return 1; }
#endif

/* acc[r] += weight of row j of the panel (held by lane j, by row r) times that row. */
template <int D>
__device__ void add_products(Compute acc[ROWS][SHARE(D)], const Compute weight[ROWS],
                             const Compute *panel) {
  int lane = threadIdx.x % LANES;
  for (int j = 0; j < LANES; ++j) {
    Compute values[SHARE(D)];
    FOR_SHARE(D, c) values[c] = panel[j * STRIDE(D) + lane + LANES * c];
    FOR_ROWS(r) {
      Compute w = __shfl_sync(EVERYONE, weight[r], j);
      if (w != 0) /* hidden elements may be NaN; w is the same for the whole warp */
        FOR_SHARE(D, c) acc[r][c] += w * values[c];
    }
  }
}

/* dots[r] = this lane's row of the panel times row r of the warp. */
template <int D>
__device__ void dot_products(Compute dots[ROWS], const Compute *rows, const Compute *panel) {
  int lane = threadIdx.x % LANES;
  FOR_ROWS(r) dots[r] = 0;
  for (int d = 0; d < D; ++d) {
    Compute x = panel[lane * STRIDE(D) + d];
    FOR_ROWS(r) dots[r] += rows[r * D + d] * x;
  }
}

/* Online softmax (FlashAttention-2, arXiv:2307.08691, alg. 1).  Thread blocks: (queries, heads). */
extern "C" __global__ void forward(const Element *q, const Element *k, const Element *v,
                                   const int *ends, int intervals, int nq, int nk, int nheads,
                                   int nheads_kv, int headdim, int headdim_v, double scale,
                                   void *out, int wide, Compute *lse) {
  Compute *rows = (Compute *)shared, *panel = rows + BLOCK_ROWS * HEADDIM;
  int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  int head = blockIdx.y, head_kv = head / (nheads / nheads_kv);
  int first = blockIdx.x * BLOCK_ROWS, warp_first = first + warp * ROWS;
  load_rows<HEADDIM>(rows, HEADDIM, BLOCK_ROWS, q, first, nq, head, nheads, headdim,
                     (Compute)scale);
  Compute acc[ROWS][SHARE(HEADDIM_V)], top[ROWS], total[ROWS];
  FOR_ROWS(r) {
    top[r] = MINUS_INFINITY;
    total[r] = 0;
    FOR_SHARE(HEADDIM_V, c) acc[r][c] = 0;
  }
  int from, to;
  hull(ends, intervals, nq, nk, first, &from, &to);
  for (int j0 = from; j0 < to; j0 += LANES) {
    int i = first + lane;
    if (!__any_sync(EVERYONE, lane < BLOCK_ROWS && i < nq &&
                                  meets(ends, intervals, nq, i, j0, j0 + LANES)))
      continue; /* no row of the thread block sees any of these keys */
    __syncthreads(); /* the previous panel may still be in use */
    load_rows<HEADDIM>(panel, STRIDE(HEADDIM), LANES, k, j0, nk, head_kv, nheads_kv, headdim, 1);
    __syncthreads();
    Compute weight[ROWS];
    dot_products<HEADDIM>(weight, rows + warp * ROWS * HEADDIM, panel);
    __syncthreads();
    load_rows<HEADDIM_V>(panel, STRIDE(HEADDIM_V), LANES, v, j0, nk, head_kv, nheads_kv, headdim_v,
                         1);
    __syncthreads();
    FOR_ROWS(r) {
      int seen = warp_first + r < nq && sees(ends, intervals, nq, nk, warp_first + r, j0 + lane);
      weight[r] = capped(weight[r]);
      Compute largest = max_of_warp(seen ? weight[r] : MINUS_INFINITY);
      if (top[r] > largest) largest = top[r];
      /* A row that has not seen a key yet keeps -inf, and -inf minus -inf would be NaN. */
      Compute shift = largest == MINUS_INFINITY ? (Compute)0 : largest;
      Compute shrink = exp(top[r] - shift);
      top[r] = largest;
      weight[r] = seen ? exp(weight[r] - shift) : (Compute)0;
      total[r] = total[r] * shrink + sum_of_warp(weight[r]);
      FOR_SHARE(HEADDIM_V, c) acc[r][c] *= shrink;
    }
    add_products<HEADDIM_V>(acc, weight, panel);
  }
  FOR_ROWS_BELOW(r, nq) {
    long long row = (long long)(warp_first + r) * nheads + head;
    if (lane == 0) lse[row] = total[r] == 0 ? MINUS_INFINITY : top[r] + log(total[r]);
    FOR_SHARE(HEADDIM_V, c)
      if (lane + LANES * c < headdim_v)
        put(out, wide, 1, row * headdim_v + lane + LANES * c,
            total[r] == 0 ? (Compute)0 : acc[r][c] / total[r]);
  }
}

/* dq (FlashAttention-2, alg. 2, by rows of queries).  Thread blocks: (queries, heads). */
extern "C" __global__ void backward_q(const Element *dout, const Element *q, const Element *k,
                                      const Element *v, const Compute *lse, const Compute *delta,
                                      const int *ends, int intervals, int nq, int nk, int nheads,
                                      int nheads_kv, int headdim, int headdim_v, double scale,
                                      void *dq, int wide, int fresh) {
  Compute *rows = (Compute *)shared, *rows_dout = rows + BLOCK_ROWS * HEADDIM;
  Compute *panel = rows_dout + BLOCK_ROWS * HEADDIM_V;
  int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  int head = blockIdx.y, head_kv = head / (nheads / nheads_kv);
  int first = blockIdx.x * BLOCK_ROWS, warp_first = first + warp * ROWS;
  load_rows<HEADDIM>(rows, HEADDIM, BLOCK_ROWS, q, first, nq, head, nheads, headdim,
                     (Compute)scale);
  load_rows<HEADDIM_V>(rows_dout, HEADDIM_V, BLOCK_ROWS, dout, first, nq, head, nheads, headdim_v,
                       1);
  Compute acc[ROWS][SHARE(HEADDIM)];
  FOR_ROWS(r)
    FOR_SHARE(HEADDIM, c) acc[r][c] = 0;
  int from, to;
  hull(ends, intervals, nq, nk, first, &from, &to);
  for (int j0 = from; j0 < to; j0 += LANES) {
    int i = first + lane;
    if (!__any_sync(EVERYONE, lane < BLOCK_ROWS && i < nq &&
                                  meets(ends, intervals, nq, i, j0, j0 + LANES)))
      continue;
    __syncthreads();
    Compute p[ROWS], dp[ROWS];
    load_rows<HEADDIM_V>(panel, STRIDE(HEADDIM_V), LANES, v, j0, nk, head_kv, nheads_kv, headdim_v,
                         1);
    __syncthreads();
    dot_products<HEADDIM_V>(dp, rows_dout + warp * ROWS * HEADDIM_V, panel);
    __syncthreads();
    load_rows<HEADDIM>(panel, STRIDE(HEADDIM), LANES, k, j0, nk, head_kv, nheads_kv, headdim, 1);
    __syncthreads();
    dot_products<HEADDIM>(p, rows + warp * ROWS * HEADDIM, panel);
    FOR_ROWS(r) {
      long long row = (long long)(warp_first + r) * nheads + head;
      int seen = warp_first + r < nq && sees(ends, intervals, nq, nk, warp_first + r, j0 + lane);
      Compute s = capped(p[r]);
      p[r] = seen ? exp(s - lse[row]) * (dp[r] - delta[row]) * slope(s) * (Compute)scale
                  : (Compute)0;
    }
    add_products<HEADDIM>(acc, p, panel);
  }
  FOR_ROWS_BELOW(r, nq)
    FOR_SHARE(HEADDIM, c)
      if (lane + LANES * c < headdim)
        put(dq, wide, fresh,
            ((long long)(warp_first + r) * nheads + head) * headdim + lane + LANES * c, acc[r][c]);
}

/* dk and dv, by rows of keys.  Thread blocks: (keys, KV heads). */
extern "C" __global__ void backward_kv(const Element *dout, const Element *q, const Element *k,
                                       const Element *v, const Compute *lse, const Compute *delta,
                                       const int *ends, int intervals, int nq, int nk, int nheads,
                                       int nheads_kv, int headdim, int headdim_v, double scale,
                                       void *dk, void *dv, int wide, int fresh) {
  Compute *rows_k = (Compute *)shared, *rows_v = rows_k + BLOCK_ROWS * HEADDIM;
  Compute *panel = rows_v + BLOCK_ROWS * HEADDIM_V;
  int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  int head_kv = blockIdx.y, group = nheads / nheads_kv;
  int first = blockIdx.x * BLOCK_ROWS, warp_first = first + warp * ROWS;
  int last = first + BLOCK_ROWS < nk ? first + BLOCK_ROWS : nk;
  load_rows<HEADDIM>(rows_k, HEADDIM, BLOCK_ROWS, k, first, nk, head_kv, nheads_kv, headdim,
                     (Compute)scale);
  load_rows<HEADDIM_V>(rows_v, HEADDIM_V, BLOCK_ROWS, v, first, nk, head_kv, nheads_kv, headdim_v,
                       1);
  Compute acc_k[ROWS][SHARE(HEADDIM)], acc_v[ROWS][SHARE(HEADDIM_V)];
  FOR_ROWS(r) {
    FOR_SHARE(HEADDIM, c) acc_k[r][c] = 0;
    FOR_SHARE(HEADDIM_V, c) acc_v[r][c] = 0;
  }
  for (int i0 = 0; i0 < nq; i0 += LANES) {
    int i = i0 + lane;
    /* All warps get the same answer, so no barrier is needed. */
    if (!__any_sync(EVERYONE, i < nq && meets(ends, intervals, nq, i, first, last))) continue;
    for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      long long row = (long long)i * nheads + head;
      Compute p[ROWS], ds[ROWS], slopes[ROWS];
      __syncthreads(); /* the previous head's panel may still be in use */
      load_rows<HEADDIM>(panel, STRIDE(HEADDIM), LANES, q, i0, nq, head, nheads, headdim, 1);
      __syncthreads();
      dot_products<HEADDIM>(p, rows_k + warp * ROWS * HEADDIM, panel);
      FOR_ROWS(r) {
        int seen = i < nq && sees(ends, intervals, nq, nk, i, warp_first + r);
        Compute s = capped(p[r]);
        slopes[r] = slope(s);
        p[r] = seen ? exp(s - lse[row]) : (Compute)0;
      }
      __syncthreads();
      load_rows<HEADDIM_V>(panel, STRIDE(HEADDIM_V), LANES, dout, i0, nq, head, nheads, headdim_v,
                           1);
      __syncthreads();
      dot_products<HEADDIM_V>(ds, rows_v + warp * ROWS * HEADDIM_V, panel);
      FOR_ROWS(r)
        ds[r] = p[r] == 0 ? (Compute)0
                          : p[r] * (ds[r] - delta[row]) * slopes[r] * (Compute)scale;
      add_products<HEADDIM_V>(acc_v, p, panel);
      __syncthreads();
      load_rows<HEADDIM>(panel, STRIDE(HEADDIM), LANES, q, i0, nq, head, nheads, headdim, 1);
      __syncthreads();
      add_products<HEADDIM>(acc_k, ds, panel);
    }
  }
  FOR_ROWS_BELOW(r, nk) {
    long long row = (long long)(warp_first + r) * nheads_kv + head_kv;
    FOR_SHARE(HEADDIM, c)
      if (lane + LANES * c < headdim)
        put(dk, wide, fresh, row * headdim + lane + LANES * c, acc_k[r][c]);
    FOR_SHARE(HEADDIM_V, c)
      if (lane + LANES * c < headdim_v)
        put(dv, wide, fresh, row * headdim_v + lane + LANES * c, acc_v[r][c]);
  }
}

/* The other kernels work on `rows` rows of `width` elements, with one warp per row. */
#define FOR_EACH_ROW(row)                                                                    \
  for (long long row = blockIdx.x * (long long)WARPS + threadIdx.x / LANES; row < rows;      \
       row += (long long)gridDim.x * WARPS)
#define FOR_EACH_COLUMN(d) for (int d = threadIdx.x % LANES; d < width; d += LANES)

/* These kernels have `lanes` lanes per row, a power of two: the rows of a warp's last lanes may be
   beyond the end.  A lane loads pieces of 16 bytes, and does so with several loads if an array begins
   elsewhere.  So the order of a sum does not depend on addresses. */
#define FOR_EACH_ROW_BY(lanes, row)                                                          \
  for (long long row = (blockIdx.x * (long long)THREADS + threadIdx.x) / (lanes);            \
       row - threadIdx.x % LANES / (lanes) < rows;                                           \
       row += (long long)gridDim.x * (THREADS / (lanes)))
#define PIECE (16 / (int)sizeof(Element)) /* elements */
#define FOR_PIECE(e) _Pragma("unroll") for (int e = 0; e < PIECE; ++e)
union Piece {
  uint4 whole;
  Element of[PIECE];
};
__device__ int is_aligned(const Element *x, int width) {
  return width % PIECE == 0 && (unsigned long long)x % sizeof(Piece) == 0;
}
/* Load elements of a row from `d` on; zeros beyond the width. */
__device__ void load_piece(Compute to[PIECE], const Element *row, int aligned, int d, int width) {
  if (aligned) {
    Piece piece = {};
    if (d < width) piece.whole = *(const uint4 *)(row + d);
    FOR_PIECE(e) to[e] = load(piece.of[e]);
  } else
    FOR_PIECE(e) to[e] = d + e < width ? load(row[d + e]) : (Compute)0;
}
__device__ void store_piece(Element *row, int aligned, int d, int width, const Compute x[PIECE]) {
  Piece piece;
  FOR_PIECE(e) piece.of[e] = narrow(x[e]);
  if (aligned && d < width) *(uint4 *)(row + d) = piece.whole;
  FOR_PIECE(e) if (!aligned && d + e < width) row[d + e] = piece.of[e];
}

/* Merge (out2, lse2) into (out, lse), see merge.py; a row is one token and head. */
extern "C" __global__ void merge(Compute *out, Compute *lse, Compute *rest, const void *out2,
                                 int wide2, const Compute *lse2, long long rows, int width) {
  FOR_EACH_ROW(row) {
    double a = (double)lse[row] + (double)rest[row], b = lse2[row];
    double shift = a > b || a != a ? a : b;
    if (shift == MINUS_INFINITY) shift = 0;
    double weight = exp(a - shift), weight2 = exp(b - shift), total = weight + weight2;
    __syncwarp(); /* all lanes have read before one lane writes */
    if (threadIdx.x % LANES == 0) {
      double exact = log(total) + shift;
      lse[row] = (Compute)exact;
      rest[row] = exact - exact == 0 ? (Compute)(exact - (double)lse[row]) : (Compute)0;
    }
    if (total == 0) total = 1;
    Compute share = (Compute)(weight / total), share2 = (Compute)(weight2 / total);
    FOR_EACH_COLUMN(d) {
      long long at = row * width + d;
      out[at] = out[at] * share + get(out2, wide2, at) * share2;
    }
  }
}

/* Merge a sink into (out, lse), see merge.py; a row is one token and head. */
extern "C" __global__ void add_sink(Compute *out, Compute *lse, const Compute *sink, int nheads,
                                    long long rows, int width) {
  FOR_EACH_ROW(row) {
    double a = lse[row], b = sink[row % nheads];
    double shift = a > b || a != a ? a : b;
    if (shift == MINUS_INFINITY) shift = 0;
    double weight = exp(a - shift), total = weight + exp(b - shift);
    __syncwarp(); /* all lanes have read before one lane writes */
    if (threadIdx.x % LANES == 0) lse[row] = (Compute)(log(total) + shift);
    Compute share = (Compute)(weight / (total == 0 ? 1 : total));
    FOR_EACH_COLUMN(d) out[row * width + d] *= share;
  }
}

/* sums[i][h] = - sum over tokens i, i + rows, ... of exp(sink[h] - lse) delta */
extern "C" __global__ void sink_sums(const Compute *lse, const Compute *delta, const Compute *sink,
                                     double *sums, int tokens, long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(h) {
    double sum = 0;
    for (long long i = row * width + h; i < (long long)tokens * width; i += rows * width) {
      double l = lse[i], x = delta[i];
      sum -= l == MINUS_INFINITY ? 0 : exp((double)sink[h] - l) * x; /* 0 without a key or sink */
    }
    sums[row * width + h] = sum;
  }
}

/* The gradient of a sink: grad[h] = sum over i of sums[i][h]; a row is one head. */
extern "C" __global__ void sink_gradient(Compute *grad, const double *sums, long long rows,
                                         int width) {
  FOR_EACH_ROW(row) {
    double sum = 0;
    FOR_EACH_COLUMN(i) sum += sums[i * rows + row];
    sum = sum_of_warp(sum);
    if (threadIdx.x % LANES == 0) grad[row] = (Compute)sum;
  }
}

/* delta = rowsum(dout * out) */
extern "C" __global__ void delta_of(const Element *dout, const Element *out, Compute *delta,
                                    int lanes, long long rows, int width) {
  int aligned = is_aligned(dout, width) && is_aligned(out, width), lane = threadIdx.x % lanes;
  FOR_EACH_ROW_BY(lanes, row) {
    Compute sum = 0, x[PIECE], y[PIECE];
    for (int d = lane * PIECE; row < rows && d < width; d += lanes * PIECE) {
      load_piece(x, dout + row * width, aligned, d, width);
      load_piece(y, out + row * width, aligned, d, width);
      FOR_PIECE(e) sum += x[e] * y[e];
    }
    sum = sum_of_warp(sum, lanes);
    if (row < rows && lane == 0) delta[row] = sum;
  }
}

/* delta -= dlse, where the query sees a key or a sink */
extern "C" __global__ void subtract(Compute *delta, const Compute *dlse, const Compute *lse,
                                    long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) {
    long long i = row * width + d;
    if (lse[i] != MINUS_INFINITY) delta[i] -= dlse[i];
  }
}

/* Write out and stats as cuDNN's backward pass takes them.  It uses out only for delta, so out is the
   multiple of dout with this delta.  dout is divided by its largest element first, because squares of
   tiny elements underflow.  stats is lse, heads first, of `queries` queries.  `source` is the row of
   lse (-1: a masked row, whose +inf gives weights of 0), `place` the place of the first head in stats,
   and `stride` the distance from a head to the next.  A lane holds its piece of the row. */
extern "C" __global__ void out_and_stats(const Element *dout, const Compute *delta, Element *out,
                                         const Compute *lse, Compute *stats,
                                         const long long *source, const long long *place,
                                         const long long *stride, int queries, int nheads,
                                         int lanes, long long rows, int width) {
  for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
       i < (long long)queries * nheads; i += (long long)gridDim.x * THREADS) {
    long long query = i % queries, head = i / queries, from = source[query];
    stats[place[query] + head * stride[query]] =
        from < 0 ? -MINUS_INFINITY : lse[from * nheads + head];
  }
  int aligned = is_aligned(dout, width) && is_aligned(out, width);
  int d = threadIdx.x % lanes * PIECE;
  FOR_EACH_ROW_BY(lanes, row) {
    Compute x[PIECE], largest = 0, sum = 0;
    load_piece(x, dout + row * width, aligned, d, row < rows ? width : 0);
    FOR_PIECE(e) {
      Compute size = x[e] < 0 ? -x[e] : x[e];
      largest = size > largest ? size : largest;
    }
    largest = max_of_warp(largest, lanes);
    Compute safe = largest > 0 ? largest : (Compute)1;
    FOR_PIECE(e) sum += x[e] / safe * (x[e] / safe);
    sum = sum_of_warp(sum, lanes);
    Compute factor = largest > 0 ? delta[row] / safe / sum / safe : (Compute)0;
    FOR_PIECE(e) x[e] *= factor;
    if (row < rows) store_piece(out + row * width, aligned, d, width, x);
  }
}

/* to[i] = from[order[i]] */
extern "C" __global__ void take_rows(Element *to, const Element *from, const long long *order,
                                     long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) to[row * width + d] = from[order[row] * width + d];
}

/* to[order[i]] = from[i]; no index occurs twice. */
extern "C" __global__ void put_rows_at(Element *to, const Element *from, const long long *order,
                                       long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) to[order[row] * width + d] = from[row * width + d];
}

/* Take columns of each row, from `first` on: to (rows, width), from (rows, stride). */
extern "C" __global__ void take_columns(Element *to, const Element *from, int stride, int first,
                                        long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) to[row * width + d] = from[row * stride + first + d];
}

/* The inverse of take_columns: to (rows, stride), from (rows, width). */
extern "C" __global__ void put_columns(Element *to, const Element *from, int stride, int first,
                                       int add, long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) {
    long long at = row * stride + first + d;
    Element x = from[row * width + d];
    to[at] = add ? narrow(load(to[at]) + load(x)) : x;
  }
}

/* to[order[i]] += from[i]; no index occurs twice. */
extern "C" __global__ void add_rows(Compute *to, const Compute *from, const long long *order,
                                    long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) to[order[row] * width + d] += from[row * width + d];
}

/* to = from or to += from for up to three arrays, of any types and widths.  If `group` is not 1, the
   sum of each `group` rows of from is taken. */
extern "C" __global__ void put_rows(void *to0, int wide0, int fresh0, const void *from0, void *to1,
                                    int wide1, int fresh1, const void *from1, void *to2,
                                    int wide2, int fresh2, const void *from2, int wide_from,
                                    int group0, int group1, int group2, int width0, int width1,
                                    long long end0, long long end1, long long rows, int width2) {
  FOR_EACH_ROW(row) {
    int i = (row >= end0) + (row >= end1);
    void *to = i == 0 ? to0 : i == 1 ? to1 : to2;
    const void *from = i == 0 ? from0 : i == 1 ? from1 : from2;
    int wide = i == 0 ? wide0 : i == 1 ? wide1 : wide2;
    int fresh = i == 0 ? fresh0 : i == 1 ? fresh1 : fresh2;
    int group = i == 0 ? group0 : i == 1 ? group1 : group2;
    int width = i == 0 ? width0 : i == 1 ? width1 : width2;
    long long at = row - (i == 0 ? 0 : i == 1 ? end0 : end1);
    FOR_EACH_COLUMN(d) {
      Compute sum = 0;
      for (int j = 0; j < group; ++j)
        sum += get(from, wide_from, (at * group + j) * width + d);
      put(to, wide, fresh, at * width + d, sum);
    }
  }
}

/* to (width, rows) = from (rows, width)^T; if turned, to (rows, width) = from (width, rows)^T.  Rows
   of from have a distance of `stride`.  There is a warp for each of the `rows`, the longer axis. */
extern "C" __global__ void transpose(Compute *__restrict__ to, const Compute *__restrict__ from,
                                     int turned, long long stride, long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) {
    if (turned)
      to[row * width + d] = from[d * stride + row];
    else
      to[d * rows + row] = from[row * stride + d];
  }
}

/* Repeat every head of from (rows, heads, headdim) `group` times: (rows, heads * group, headdim). */
extern "C" __global__ void repeat_heads(Element *to, const Element *from, int group, int headdim,
                                        long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) {
    int head = d / headdim / group;
    to[row * width + d] = from[row * (width / group) + head * headdim + d % headdim];
  }
}

__device__ float power_of_two(int exponent) { /* from -126 to 127 */
  Bits y;
  y.bits = (unsigned int)(exponent + 127) << 23;
  return y.value;
}

/* Encode for the wire, to (rows, bytes) from (rows, width), see core/wire.py.  A mantissa of 7 bits
   is bfloat16, 3 bits are E4M3, and 1 bit is E2M1.  A warp encodes blocks of 32 elements, and a lane
   one element of each. */
extern "C" __global__ void encode(unsigned char *to, const Element *from, int bytes, int mantissa,
                                  int lowest, int highest, double top, long long rows, int width) {
  FOR_EACH_ROW(row) {
    int lane = threadIdx.x % LANES, blocks = (width + LANES - 1) / LANES;
    unsigned char *encoded = to + row * bytes;
    for (int b = 0; b < blocks; ++b) {
      int d = b * LANES + lane;
      Bits x;
      x.value = d < width ? (float)load(from[row * width + d]) : 0.0f;
      if (mantissa == 7) {
        if (d < width) ((unsigned short *)encoded)[d] = bfloat16_of(x.value);
        continue;
      }
      int sign = x.bits >> 31, largest;
      x.bits &= 0x7fffffff;
      largest = x.bits; /* without signs, floats have the same order as their bits */
      for (int step = LANES / 2; step > 0; step /= 2) {
        int other = __shfl_xor_sync(EVERYONE, largest, step);
        largest = other > largest ? other : largest;
      }
      int exponent = largest >> 23, scale = exponent > highest ? exponent - highest : 0;
      if (exponent == 255) scale = 255;
      x.value = scale == 255 ? 0.0f : x.value * power_of_two(127 - scale);
      if (x.value > (float)top) x.value = (float)top;
      int place = (int)(x.bits >> 23) - 127;
      if (place < lowest) place = lowest;
      /* In units of the last place the value is an integer; a carry increments the exponent. */
      int code = (int)rintf(x.value * power_of_two(mantissa - place));
      code += (place - lowest) << mantissa;
      code |= sign << (mantissa == 3 ? 7 : 3);
      int next = __shfl_xor_sync(EVERYONE, code, 1);
      if (mantissa == 3 && d < width) encoded[d] = (unsigned char)code;
      if (mantissa == 1 && d < width && d % 2 == 0) encoded[d / 2] = (unsigned char)(code | next << 4);
      if (lane == 0) encoded[bytes - blocks + b] = (unsigned char)scale;
    }
  }
}

/* Decode, the inverse of encode: to (rows, width), from (rows, bytes). */
extern "C" __global__ void decode(Element *to, const unsigned char *from, int bytes, int mantissa,
                                  int lowest, long long rows, int width) {
  FOR_EACH_ROW(row) FOR_EACH_COLUMN(d) {
    const unsigned char *given = from + row * bytes;
    Bits y;
    if (mantissa == 7) {
      y.bits = (unsigned int)((const unsigned short *)given)[d] << 16;
    } else {
      int blocks = (width + LANES - 1) / LANES, scale = given[bytes - blocks + d / LANES];
      int code = mantissa == 3 ? given[d] : given[d / 2] >> (d % 2 * 4) & 15;
      int sign = code >> (mantissa == 3 ? 7 : 3);
      code &= mantissa == 3 ? 127 : 7;
      int exponent = code >> mantissa, digits = code & ((1 << mantissa) - 1);
      if (exponent) digits |= 1 << mantissa;
      /* Two factors, neither of them subnormal: CuPy compiles subnormal floats to zeros. */
      int power = (exponent ? exponent - 1 : 0) + lowest - mantissa + scale - 127;
      y.value = (float)digits * power_of_two(power / 2) * power_of_two(power - power / 2);
      if (scale == 255 || (mantissa == 3 && code == 127)) y.bits = 0x7fc00000;
      y.bits |= (unsigned int)sign << 31;
    }
    to[row * width + d] = narrow((Compute)y.value);
  }
}
