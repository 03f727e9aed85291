// In place of tensor_cores/tensor.cu: products of 16 rows by 8, for which the lanes of a warp
// meet, and fetches that come at once or as late as they may.
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
  const unsigned* mine[3] = {upper, lower, x};
  uint64_t theirs[3][32];
  for (int i = 0; i < 3; i++) {
    uint64_t pairs;
    memcpy(&pairs, mine[i], 8);
    memcpy(theirs[i], shim::meet(pairs, 0, __LINE__), sizeof(theirs[i]));
  }
  for (int i = 0; i < 4; i++) {
    const int column = me % 4 * 2 + i % 2;
    for (int at = 0; at < 4; at++) {
      for (int k = 0; k < 4; k++) {
        const unsigned a = theirs[i / 2][me / 4 * 4 + at] >> k / 2 * 32;
        const unsigned b = theirs[2][column * 4 + at] >> k / 2 * 32;
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

inline float from_lane(float x, int lane) {
  const uint64_t number = shim::bits_of(x);
  return shim::float_of((unsigned)shim::meet(number, 0, __LINE__)[lane]);
}

inline float power(float x) { return exp2f(x); }

struct Fetch {
  Piece* to;
  Piece piece;
};
struct Fetches {
  Fetch at[512];
  int count, groups;
  int ends[16];
};
static Fetches fetches[shim::MAX_THREADS];

// Called for each piece that has come by a fetch.
static void (*note_fetched)(Piece* to);

inline void fetch(Piece* to, const Piece* from, bool exists) {
  Fetches& mine = fetches[shim::current];
  if (exists) shim::check_read(from, sizeof(Piece));
  const Fetch one = {to, exists && !shim::failure ? *from : Piece{}};
  if (shim::running == shim::ASCENDING) {
    *to = one.piece;
    if (note_fetched) note_fetched(to);
  } else {
    mine.at[mine.count++] = one;
  }
}

inline void close_fetches() {
  Fetches& mine = fetches[shim::current];
  mine.ends[mine.groups++] = mine.count;
}

template <int N>
void await_fetches() {
  Fetches& mine = fetches[shim::current];
  if (mine.groups <= N) return;
  const int groups = mine.groups - N, done = mine.ends[groups - 1];
  for (int i = 0; i < done; i++) {
    *mine.at[i].to = mine.at[i].piece;
    if (note_fetched) note_fetched(mine.at[i].to);
  }
  for (int i = done; i < mine.count; i++) mine.at[i - done] = mine.at[i];
  for (int i = groups; i < mine.groups; i++) mine.ends[i - groups] = mine.ends[i] - done;
  mine.count -= done;
  mine.groups = N;
}

// Which lane has which rows and columns is PTX's ldmatrix with .trans.
inline void load_columns(unsigned* to, const Piece* row) {
  const int me = shim::current % 32;
  const uint64_t* rows = shim::meet(row, 0, __LINE__);
  for (int i = 0; i < 4; i++) {
    to[i] = 0;
    for (int k = 0; k < 2; k++) {
      const unsigned word = ((const Piece*)rows[i * 8 + me % 4 * 2 + k])->at[me / 4 / 2];
      to[i] |= (word >> me / 4 % 2 * 16 & 0xffff) << k * 16;
    }
  }
}
