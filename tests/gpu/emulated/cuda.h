/* CUDA on one core, as far as kernels.cu goes: its blocks run one after the other, the threads of a
   block as coroutines that change over at barriers.  A barrier that not all threads reach ends the
   program, and so does one that some threads leave the kernel before. */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csetjmp>
#include <functional>
#include <ucontext.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define __global__
#define __device__ static inline
#define __shared__

struct Index {
  unsigned x, y, z;
};
static Index blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { /* what is loaded from elsewhere faults, as on a GPU */
  unsigned x, y, z, w;
};

static unsigned char shared_bytes[227 << 10] alignas(16); /* what a Hopper block can have */
#define shared ((double *)shared_bytes)

namespace emulated {
constexpr int WARP = 32, MOST = 256, STACK = 1 << 17;
enum State { READY, AT_WARP, AT_BLOCK, DONE };
struct Thread {
  Index index;
  State state;
  bool started;
  jmp_buf here;
  ucontext_t first;
};
static Thread threads[MOST];
static char stacks[MOST][STACK];
static int current;
static jmp_buf scheduler;
static ucontext_t main_context;
static std::function<void()> kernel;
static unsigned char slots[2][MOST][8]; /* of shuffles: two, so that one barrier each is enough */
static int turn[MOST];

static void wait(State at) {
  threads[current].state = at;
  if (!_setjmp(threads[current].here)) _longjmp(scheduler, 1);
}
static void entry() {
  kernel();
  threads[current].state = DONE;
  _longjmp(scheduler, 1);
}
static void resume(int t) {
  current = t;
  if (_setjmp(scheduler)) return;
  if (threads[t].started) _longjmp(threads[t].here, 1);
  threads[t].started = true;
  setcontext(&threads[t].first);
}
/* Let threads [from, to) go on if all are at the same barrier. */
static bool release(int from, int to, State at) {
  for (int t = from; t < to; ++t)
    if (threads[t].state != at) return false;
  for (int t = from; t < to; ++t) threads[t].state = READY;
  return true;
}
static void run_block(int n, bool backwards) {
  for (int t = 0; t < n; ++t) {
    threads[t].index = {unsigned(t), 0, 0};
    threads[t].state = READY;
    threads[t].started = false;
    turn[t] = 0;
    getcontext(&threads[t].first);
    threads[t].first.uc_stack.ss_sp = stacks[t];
    threads[t].first.uc_stack.ss_size = STACK;
    threads[t].first.uc_link = nullptr;
    makecontext(&threads[t].first, entry, 0);
  }
  for (;;) {
    bool moved = false;
    for (int i = 0; i < n; ++i) {
      int t = backwards ? n - 1 - i : i;
      if (threads[t].state == READY) resume(t), moved = true;
    }
    for (int w = 0; w < n; w += WARP) moved |= release(w, w + WARP, AT_WARP);
    if (threads[0].state == AT_BLOCK && release(0, n, AT_BLOCK)) moved = true;
    if (moved) continue;
    for (int t = 0; t < n; ++t)
      if (threads[t].state != DONE) {
        fprintf(stderr, "emulated GPU: not all threads reach a barrier\n");
        abort();
      }
    return;
  }
}
/* What a launch asked for ends where its shared memory ends. */
static void check_shared(unsigned bytes) {
  for (unsigned i = bytes; i < sizeof shared_bytes; ++i)
    if (shared_bytes[i] != 0xff) {
      fprintf(stderr, "emulated GPU: writes past %u bytes of shared memory\n", bytes);
      abort();
    }
}
static void launch(int gx, int gy, int threads, unsigned bytes, std::function<void()> body) {
  memset(shared_bytes, 0xff, sizeof shared_bytes); /* NaN */
  static const char *order = getenv("EMULATED_GPU_ORDER");
  kernel = body;
  gridDim = {unsigned(gx), unsigned(gy), 1};
  blockDim = {unsigned(threads), 1, 1};
#if defined(__SSE__) && ELEMENT < 3 /* CuPy compiles with -ftz=true: tiny floats are zeros */
  unsigned kept = _mm_getcsr();
  _mm_setcsr(kept | 0x8040);
#endif
  for (int y = 0; y < gy; ++y)
    for (int x = 0; x < gx; ++x) {
      blockIdx = {unsigned(x), unsigned(y), 0};
      run_block(threads, order && !strcmp(order, "backwards"));
    }
  check_shared(bytes);
#if defined(__SSE__) && ELEMENT < 3
  _mm_setcsr(kept);
#endif
}
template <class T> T shuffle(T value, int lane) {
  int &side = turn[current], warp = current / WARP * WARP;
  auto &slot = slots[side];
  side = 1 - side;
  memcpy(slot[current], &value, sizeof value);
  wait(AT_WARP);
  memcpy(&value, slot[warp + lane], sizeof value);
  return value;
}
static int any(int vote) {
  int &side = turn[current], warp = current / WARP * WARP, found = 0, other;
  auto &slot = slots[side];
  side = 1 - side;
  memcpy(slot[current], &vote, sizeof vote);
  wait(AT_WARP);
  for (int lane = 0; lane < WARP; ++lane) {
    memcpy(&other, slot[warp + lane], sizeof other);
    found |= other;
  }
  return found;
}
} // namespace emulated

#define threadIdx (emulated::threads[emulated::current].index)
static inline void __syncwarp() { emulated::wait(emulated::AT_WARP); }
static inline void __syncthreads() { emulated::wait(emulated::AT_BLOCK); }
static inline int __any_sync(unsigned, int vote) { return emulated::any(vote); }
template <class T> T __shfl_sync(unsigned, T value, int lane) {
  return emulated::shuffle(value, lane);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::shuffle(value, emulated::current % emulated::WARP ^ mask);
}
using std::exp;
using std::log;
static inline float __int_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline float half_to_float(unsigned short bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return x;
}
static inline unsigned short float_to_half(float value) {
  _Float16 x = value;
  unsigned short bits;
  memcpy(&bits, &x, 2);
  return bits;
}
