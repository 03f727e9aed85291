// In place of tensor_cores/tensor.cu: products of 16 rows by 8, by shuffles.
#pragma once

struct alignas(16) Piece {
  unsigned at[4];
};

inline Piece stream(const Piece* from) { return *from; }

template <typename T>
float number(unsigned word, int half) {
  const unsigned short bits = word >> half * 16;
  T value;
  memcpy(&value, &bits, 2);
  return float(value);
}

// A lane sums up two columns of two rows; whose numbers are whose is PTX's mma.m16n8k16.
template <typename T>
void multiply(
    float* sums, const unsigned* upper, const unsigned* lower, const unsigned* x, T) {
  const int me = shim::current % 32;
  uint64_t theirs[32][3];
  for (int far = 0; far < 32; far++) {
    const unsigned* mine[3] = {upper, lower, x};
    for (int i = 0; i < 3; i++) {
      uint64_t pairs;
      memcpy(&pairs, mine[i], 8);
      theirs[me ^ far][i] = shim::shuffle_xor(pairs, far, __LINE__);
    }
  }
  for (int i = 0; i < 4; i++) {
    const int column = me % 4 * 2 + i % 2;
    for (int at = 0; at < 4; at++) {
      for (int k = 0; k < 4; k++) {
        const unsigned a = theirs[me / 4 * 4 + at][i / 2] >> k / 2 * 32;
        const unsigned b = theirs[column * 4 + at][2] >> k / 2 * 32;
        sums[i] += number<T>(a, k % 2) * number<T>(b, k % 2);
      }
    }
  }
}

template <typename T>
unsigned packed(float low, float high, T) {
  const T both[2] = {T(low), T(high)};
  unsigned word;
  memcpy(&word, both, 4);
  return word;
}
