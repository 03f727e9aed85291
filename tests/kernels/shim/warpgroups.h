// In place of tensor_cores/warpgroups.cu: products of four warps, each computed by its lanes, and
// copies that come when a thread waits for them.
#pragma once

alignas(1024) static Piece dynamic_memory[232448 / 16];
#define SHARED_PIECES(name) Piece* const name = dynamic_memory

inline unsigned shared_place(const void* at) { return (unsigned)(uintptr_t)at; }

inline float reciprocal(float x) { return 1.0f / x; }

template <typename T>
unsigned multiply_add(unsigned a, unsigned b, unsigned c, T type) {
  return packed(
      number<T>(a, 0) * number<T>(b, 0) + number<T>(c, 0),
      number<T>(a, 1) * number<T>(b, 1) + number<T>(c, 1), type);
}

inline const Piece* columns_at(const Piece* at) { return at; }

// Which pieces of dynamic memory have come by a fetch since the thread published, and whose they are.
static unsigned short fetched_by[sizeof(dynamic_memory) / sizeof(Piece)];
struct Fetched {
  int at[4096], count;
};
static Fetched fetched[shim::MAX_THREADS];

inline void note_piece(Piece* to) {
  Fetched& mine = fetched[shim::current];
  if (mine.count == 4096) return;
  fetched_by[to - dynamic_memory] = shim::current + 1;
  mine.at[mine.count++] = to - dynamic_memory;
}
static const bool notes = (note_fetched = note_piece, true);

// Which lane has which rows and columns is PTX's wgmma. A product reads shared memory when its
// group is awaited.
struct Product {
  float* sums;
  const unsigned* rows;
  const Piece* columns;
  int size;
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
    const int column = i / 4 * 8 + me % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      // Lines of 128 bytes, whose pieces are exchanged.
      uintptr_t place = (uintptr_t)product.columns + column / 8 * 1024 + column % 8 * 128;
      place += k / 8 * 16;
      place ^= (place >> 7 & 7) << 4;
      if (fetched_by[(const Piece*)(place & ~(uintptr_t)15) - dynamic_memory]) {
        shim::failure = shim::UNPUBLISHED;
      }
      unsigned short bits;
      memcpy(&bits, (const char*)place + k % 8 * 2, 2);
      const unsigned row = theirs[k / 8][me / 4 * 4 + k % 8 / 2] >> i % 4 / 2 * 32;
      product.sums[i] += number<T>(row, k % 2) * number<T>(bits, 0);
    }
  }
}

template <int N, typename T>
void multiply_tile(float (&sums)[N], const unsigned* rows, const Piece* columns, T) {
  Products& mine = products[shim::current];
  mine.at[mine.count++] = {sums, rows, columns, N, multiply_now<T>};
}

inline void publish() {
  Fetched& mine = fetched[shim::current];
  for (int i = 0; i < mine.count; i++) {
    if (fetched_by[mine.at[i]] == shim::current + 1) fetched_by[mine.at[i]] = 0;
  }
  mine.count = 0;
}

inline void begin_tiles() {}

template <typename T>
void keep(const T*&) {}

template <int COUNT>
void give_registers() {}

template <int COUNT>
void take_registers() {}

// A part of the threads meets: how many are there, and who waits. Programs would share such variables
// of a template.
static int num_met;
static bool has_met[shim::MAX_THREADS];

template <int THREADS>
void meet() {
  if (++num_met < THREADS) {
    has_met[shim::current] = true;
    shim::wait();
  } else {
    num_met = 0;
    for (int i = 0; i < THREADS; i++) {
      if (has_met[i]) shim::warps[i / 32].ready |= 1u << i % 32;
      has_met[i] = false;
    }
  }
  shim::pause();
}

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

template <int N>
void await_sums(float (&)[N]) {
  await_tiles<0>();
}

struct Line {
  char* to;
  const char* from;
  int bytes;
};
// What threads wait at: how many have yet to arrive of how many, copies that have not come, the bytes
// that they should have, how often all have arrived, and the threads that wait.
struct Arrival {
  int threads, missing;
  Line lines[128];
  int count, announced, comings, waiting;
  bool waits[shim::MAX_THREADS];
};
static Arrival arrivals_of[64];
static unsigned num_arrivals;

inline void open_arrival(unsigned long long* arrival, int threads) {
  *arrival = num_arrivals++ % 64;
  arrivals_of[*arrival] = {threads, threads};
}

// Ends a turn if all have arrived. Copies come when somebody waits for them.
inline void end_turn(Arrival& all) {
  int bytes = 0;
  if (all.missing < 0) shim::failure = shim::DEADLOCK;
  for (int i = 0; i < all.count; i++) bytes += all.lines[i].bytes;
  if (all.missing > 0 || bytes != all.announced) return;
  for (int i = 0; i < all.count; i++) {
    if (shim::running != shim::ASCENDING) {
      memcpy(all.lines[i].to, all.lines[i].from, all.lines[i].bytes);
    }
  }
  all.count = all.announced = all.waiting = 0;
  all.missing = all.threads;
  all.comings++;
  for (int i = 0; i < shim::num_threads; i++) {
    if (all.waits[i]) shim::warps[i / 32].ready |= 1u << i % 32;
    all.waits[i] = false;
  }
}

inline void arrive(unsigned long long* arrival, bool does) {
  if (!does) return;
  Arrival& all = arrivals_of[*arrival];
  all.missing--;
  if (all.waiting) end_turn(all);
}

inline void announce(unsigned long long* arrival, int bytes) {
  arrivals_of[*arrival].announced += bytes;
  arrive(arrival, true);
}

// Copies come at once or as late as they may.
inline void fetch_line(void* to, const void* from, int bytes, unsigned long long* arrival) {
  Arrival& all = arrivals_of[*arrival];
  if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) shim::failure = shim::DEADLOCK;
  shim::check_read(from, bytes);
  if (shim::failure) return;
  all.lines[all.count++] = {(char*)to, (const char*)from, bytes};
  if (shim::running == shim::ASCENDING) memcpy(to, from, bytes);
  if (all.waiting) end_turn(all);
}

inline void await_arrival(unsigned long long* arrival, int parity) {
  Arrival& all = arrivals_of[*arrival];
  if (all.comings % 2 == parity) end_turn(all);
  if (all.comings % 2 != parity) return;
  all.waits[shim::current] = true;
  all.waiting++;
  shim::wait();
  shim::pause();
}
