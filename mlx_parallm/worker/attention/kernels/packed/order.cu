// Threadgroups of a launch that read what others of it have written. Those that are awaited are
// before them in the grid, so that they have begun already, and wait for none behind them. The
// serial split-K of CUTLASS relies on the same order. If threadgroups began in another one, the launch
// would fail after some 10 s in place of waiting for ever; the process has to start anew then, as
// after any fault of the device. Counts of arrivals, `arrivals_pool`, are an input that threadgroups
// write: zeros that another launch has made for this one alone.
constexpr int MAX_POLLS = 1 << 24;

// Waits for the first threads of the threadgroup, so many; 0: for all.
template <int THREADS>
inline void meet_first() {
  if (THREADS) {
    meet<THREADS>();
  } else {
    __syncthreads();
  }
}

// Waits until so many threadgroups have arrived. What they wrote can be read then by all threads, or
// the first ones, that call it.
template <int THREADS = 0>
inline void await_threadgroups(const unsigned* arrived, unsigned count) {
  if (threadIdx.x == 0) {
    int polls = 0;
    while (*(const volatile unsigned*)arrived < count) {
      if (++polls == MAX_POLLS) {
        __trap();
      }
    }
    __threadfence();
  }
  meet_first<THREADS>();
}

// Lets others read what all threads, or the first ones, of a threadgroup wrote; they call it.
template <int THREADS = 0>
inline void arrive_threadgroup(unsigned* arrived) {
  meet_first<THREADS>();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
  }
}
