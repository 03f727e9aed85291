// Runs the threads of a threadgroup as fibers, one at a time, each until it must wait for others.
//
// A warp's lanes meet at shuffles, a threadgroup's threads at barriers, and nowhere else: between
// two meetings a fiber runs alone, as far ahead of the others as the order allows. Orders are
// chosen by the caller; what a kernel leaves unsynchronised goes wrong under one of them.
#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

// Not <cmath>, which would take longer to compile than all the rest.
extern "C" {
float cosf(float);
float exp2f(float);
float fabsf(float);
float fmaxf(float, float);
float fminf(float, float);
float logf(float);
float rintf(float);
float sinf(float);
float sqrtf(float);
float tanhf(float);
}

// Both languages have these.
static inline int min(int x, int y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline float exp2(float x) { return exp2f(x); }
static inline float fmax(float x, float y) { return fmaxf(x, y); }
static inline float fmin(float x, float y) { return fminf(x, y); }
static inline float rint(float x) { return rintf(x); }
static inline float rsqrt(float x) { return 1.0f / sqrtf(x); }

namespace shim {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;
constexpr int STACK = 1 << 17;

enum Order { ASCENDING = 0, DESCENDING = 1, SHUFFLED = 2 };
// What `launch` returns.
enum Failure {
  NONE = 0, DEADLOCK = 1, DIVERGED = 2, BAD_FLAGS = 3, OUT_OF_BOUNDS = 4, UNPUBLISHED = 5,
  POSTPONED = 6  // the threadgroup waits for others, and begins again
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool begun;
  int line;  // where it waits
  int far;   // its partner in a shuffle
};

struct Warp {
  uint32_t ready;  // a bit a lane that can go on
  int arrived;
  int round;
  uint64_t values[2][WARP];
};

static Fiber fibers[MAX_THREADS];
static Warp warps[MAX_THREADS / WARP];
static char stacks[MAX_THREADS][STACK];
static jmp_buf scheduler;
static int current;
static int num_threads;
static int num_done;
static int at_barrier;
static int failure;
static Order running;
static void (*thread_body)(int);

__attribute__((noinline)) static void pause() {
  if (_setjmp(fibers[current].at) == 0) {
    _longjmp(scheduler, 1);
  }
}

static void wait() { warps[current / WARP].ready &= ~(1u << current % WARP); }

static void enter() {
  // A fiber's next threadgroup begins where the one before ended: to make a context costs calls
  // of the system.
  for (;;) {
    thread_body(current);
    num_done++;
    wait();
    pause();
  }
}

static int lanes_of(int warp) {
  const int left = num_threads - warp * WARP;
  return left < WARP ? left : WARP;
}

static void make_ready(int warp) { warps[warp].ready = ~0u >> (WARP - lanes_of(warp)); }

// Every lane of the warp gets what all of them hand in, by lane; all must be at the same line, and
// shuffle as far. It stays until the lane's next meeting but one.
template <typename T>
static const uint64_t* meet(T value, int far, int line) {
  const int me = current, first = me - me % WARP;
  Warp& warp = warps[me / WARP];
  const int slot = warp.round & 1;
  warp.values[slot][me % WARP] = 0;
  memcpy(&warp.values[slot][me % WARP], &value, sizeof(T));
  fibers[me].line = line;
  fibers[me].far = far;
  if (++warp.arrived == lanes_of(me / WARP)) {
    for (int i = first; i < first + warp.arrived; i++) {
      if (fibers[i].line != line || fibers[i].far != far) failure = DIVERGED;
    }
    make_ready(me / WARP);
    warp.arrived = 0;
    warp.round++;
  } else {
    wait();
  }
  // Also the last to arrive pauses: whether it goes on first is the order's choice.
  pause();
  return warp.values[slot];
}

// Every lane of the warp gets its partner's value.
template <typename T>
static T shuffle_xor(T value, int far, int line) {
  const uint64_t* values = meet(value, far, line);
  T result;
  memcpy(&result, &values[current % WARP ^ far], sizeof(T));
  return result;
}

// The warp's lanes meet.
static void warp_barrier(int line) { shuffle_xor(0, 0, line); }

static void barrier(int line) {
  fibers[current].line = line;
  wait();
  if (++at_barrier == num_threads) {
    for (int i = 0; i < num_threads; i++) {
      if (fibers[i].line != line) failure = DIVERGED;
    }
    for (int i = 0; i * WARP < num_threads; i++) make_ready(i);
    at_barrier = 0;
  }
  pause();
}

// Where the kernel's arrays begin and end.
static const char* bounds[32][2];
static int num_arrays;

// Copies read within arrays, which have no guard pages.
static void check_read(const void* from, int bytes) {
  const char* at = (const char*)from;
  for (int i = 0; i < num_arrays; i++) {
    if (bounds[i][0] <= at && at + bytes <= bounds[i][1]) return;
  }
  failure = OUT_OF_BOUNDS;
}

static uint64_t random_state = 1;
static uint32_t random_below(uint32_t bound) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(random_state >> 33) % bound;
}

// The first thread from `start` to the end that can go on, or -1.
static int first_ready(int start) {
  uint32_t ready = warps[start / WARP].ready & ~0u << start % WARP;
  for (int i = start / WARP;;) {
    if (ready) return i * WARP + __builtin_ctz(ready);
    if (++i * WARP >= num_threads) return -1;
    ready = warps[i].ready;
  }
}

static int last_ready() {
  for (int i = (num_threads - 1) / WARP; i >= 0; i--) {
    if (warps[i].ready) return i * WARP + WARP - 1 - __builtin_clz(warps[i].ready);
  }
  return -1;
}

static int next_ready(Order order) {
  if (order == DESCENDING) return last_ready();
  const int found = first_ready(order == SHUFFLED ? random_below(num_threads) : 0);
  return found < 0 && order == SHUFFLED ? first_ready(0) : found;
}

// Shared memory is full of NaN when a threadgroup starts (ELF only: the linker names its section).
#ifdef __ELF__
#define SHIM_SHARED __attribute__((section("shim_shared"))) static
extern "C" char __start_shim_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_shim_shared[] __attribute__((weak, visibility("hidden")));
static void forget_shared() {
  if (__start_shim_shared) {
    memset(__start_shim_shared, 0xff, __stop_shim_shared - __start_shim_shared);
  }
}
#else
#define SHIM_SHARED static
static void forget_shared() {}
#endif

static void run_threadgroup(int threads, Order order) {
  forget_shared();
  num_threads = threads;
  running = order;
  num_done = at_barrier = 0;
  for (int i = 0; i * WARP < threads; i++) {
    make_ready(i);
    warps[i].arrived = 0;
  }
  while (failure == NONE) {
    current = next_ready(order);
    if (current < 0) break;
    Fiber& fiber = fibers[current];
    if (_setjmp(scheduler) == 0) {
      if (fiber.begun) _longjmp(fiber.at, 1);
      fiber.begun = true;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = stacks[current];
      fiber.start.uc_stack.ss_size = STACK;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, enter, 0);
      setcontext(&fiber.start);
    }
  }
  if (failure == NONE && num_done < threads) failure = DEADLOCK;
  // Those of a failure stand amid their bodies.
  for (int i = 0; i < threads && failure != NONE; i++) fibers[i].begun = false;
}

// Runs threadgroups that wait for none.
template <typename Run>
static void run_in_order(unsigned groups, Run run) {
  for (unsigned group = 0; group < groups && !failure; group++) run(group);
}

// Runs threadgroups of which some wait for others, each as early as it can: so one that waits for
// too few, or for none, reads what is not there yet.
template <typename Run>
static void run_waiting(unsigned groups, Run run) {
  static bool is_done[1 << 12];
  memset(is_done, 0, sizeof(is_done));
  for (unsigned left = groups; left > 0 && failure == NONE;) {
    const unsigned before = left;
    for (int group = groups - 1; group >= 0 && left == before; group--) {
      if (is_done[group]) continue;
      run(group);
      if (failure == POSTPONED) {
        failure = NONE;
      } else if (failure == NONE) {
        is_done[group] = true;
        left--;
      } else {
        return;
      }
    }
    if (left == before) failure = POSTPONED;
  }
}

}  // namespace shim
