// In place of tensor_cores/warpgroups.cu: products of four warps, each computed by its lanes, and
// copies that come when a thread waits for them.
#pragma once

alignas(1024) static Piece dynamic_memory[232448 / 16];
#define SHARED_PIECES(name) Piece* const name = dynamic_memory

inline unsigned shared_place(const void* at) { return (unsigned)(uintptr_t)at; }

template <typename T>
unsigned multiply_add(unsigned a, unsigned b, unsigned c, T type) {
  return packed(
      number<T>(a, 0) * number<T>(b, 0) + number<T>(c, 0),
      number<T>(a, 1) * number<T>(b, 1) + number<T>(c, 1), type);
}

inline const Piece* columns_at(const Piece* at) { return at; }

// Which lane has which rows and columns is PTX's wgmma. A product reads shared memory when its
// group is awaited.
struct Product {
  float* sums;
  const unsigned* rows;
  const Piece* columns;
  int size;
  bool adds;
  void (*multiply)(const Product&);
};
struct Products {
  Product at[64];
  int count, groups;
  int ends[16];
};
static Products products[shim::MAX_THREADS];

template <typename T>
void multiply_now(const Product& product) {
  const int me = shim::current % 32;
  uint64_t theirs[2][32];
  for (int i = 0; i < 2; i++) {
    uint64_t pairs;
    memcpy(&pairs, product.rows + 2 * i, 8);
    memcpy(theirs[i], shim::meet(pairs, 0, __LINE__), sizeof(theirs[i]));
  }
  for (int i = 0; i < product.size; i++) {
    if (!product.adds) product.sums[i] = 0.0f;
    const int column = i / 4 * 8 + me % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      // Lines of 128 bytes, whose pieces are exchanged.
      uintptr_t place = (uintptr_t)product.columns + column / 8 * 1024 + column % 8 * 128;
      place += k / 8 * 16;
      place ^= (place >> 7 & 7) << 4;
      unsigned short bits;
      memcpy(&bits, (const char*)place + k % 8 * 2, 2);
      const unsigned row = theirs[k / 8][me / 4 * 4 + k % 8 / 2] >> i % 4 / 2 * 32;
      product.sums[i] += number<T>(row, k % 2) * number<T>(bits, 0);
    }
  }
}

template <int N, typename T>
void multiply_tile(float (&sums)[N], const unsigned* rows, const Piece* columns, bool adds, T) {
  Products& mine = products[shim::current];
  mine.at[mine.count++] = {sums, rows, columns, N, adds, multiply_now<T>};
}

inline void publish() {}

inline void begin_tiles() {}

inline void end_tiles() {
  Products& mine = products[shim::current];
  mine.ends[mine.groups++] = mine.count;
}

template <int N>
void await_tiles() {
  Products& mine = products[shim::current];
  if (mine.groups <= N) return;
  const int groups = mine.groups - N, done = mine.ends[groups - 1];
  for (int i = 0; i < done; i++) mine.at[i].multiply(mine.at[i]);
  for (int i = done; i < mine.count; i++) mine.at[i - done] = mine.at[i];
  for (int i = groups; i < mine.groups; i++) mine.ends[i - groups] = mine.ends[i] - done;
  mine.count -= done;
  mine.groups = N;
}

struct Line {
  char* to;
  const char* from;
  int bytes;
};
// Copies that have not come, the bytes that they should have, and how often some have come.
struct Arrival {
  Line lines[128];
  int count, announced, comings;
};
static Arrival arrivals_of[16];
static unsigned num_arrivals;

inline void open_arrival(unsigned long long* arrival) {
  *arrival = num_arrivals++ % 16;
  arrivals_of[*arrival] = {};
}

inline void announce(unsigned long long* arrival, int bytes) {
  arrivals_of[*arrival].announced += bytes;
}

// Copies come at once or as late as they may.
inline void fetch_line(void* to, const void* from, int bytes, unsigned long long* arrival) {
  Arrival& all = arrivals_of[*arrival];
  if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) shim::failure = shim::DEADLOCK;
  all.lines[all.count++] = {(char*)to, (const char*)from, bytes};
  if (shim::running == shim::ASCENDING) memcpy(to, from, bytes);
}

// All threads meet here, so that those that copy have come.
inline void await_arrival(unsigned long long* arrival, int parity) {
  shim::barrier(__LINE__);
  Arrival& all = arrivals_of[*arrival];
  if (all.announced) {
    for (int i = 0; i < all.count; i++) {
      all.announced -= all.lines[i].bytes;
      if (shim::running != shim::ASCENDING) {
        memcpy(all.lines[i].to, all.lines[i].from, all.lines[i].bytes);
      }
    }
    all.count = 0;
    all.comings++;
  }
  if (all.announced || (all.comings + 1) % 2 != parity) shim::failure = shim::DEADLOCK;
}
