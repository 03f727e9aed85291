// In place of packed/order.cu: a threadgroup that would wait begins again, once others have run.
#pragma once

template <int THREADS>
void meet_first() {
  if (THREADS) {
    meet<THREADS ? THREADS : 1>();
  } else {
    __syncthreads();
  }
}

template <int THREADS = 0>
void await_threadgroups(const unsigned* arrived, unsigned count) {
  // Products and fetches of a threadgroup that begins again are done.
  meet_first<THREADS>();
  if (*arrived < count) {
    shim::failure = shim::POSTPONED;
    shim::pause();
  }
  meet_first<THREADS>();
}

template <int THREADS = 0>
void arrive_threadgroup(unsigned* arrived) {
  meet_first<THREADS>();
  if (threadIdx.x == 0) {
    ++*arrived;
  }
}
