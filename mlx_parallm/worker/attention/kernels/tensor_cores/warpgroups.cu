// Products of a warpgroup, 128 threads, with 64 rows in registers and N columns in shared memory,
// 16 deep (PTX ISA, wgmma.m64nNk16); and copies of whole lines to shared memory.

// Dynamic shared memory.
#define SHARED_PIECES(name) extern __shared__ Piece name[]

// Returns a place in shared memory as instructions take it.
inline unsigned shared_place(const void* at) {
  return (unsigned)__cvta_generic_to_shared(at);
}

// Returns 1 / x, off by a bit at most; 0 for results that would be subnormal.
inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns a * b + c of two numbers each, rounded once.
inline unsigned multiply_add(unsigned a, unsigned b, unsigned c, __nv_bfloat16) {
  unsigned result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

inline unsigned multiply_add(unsigned a, unsigned b, unsigned c, __half) {
  unsigned result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Describes columns in shared memory: lines of 128 bytes, whose pieces are in the order of their
// number XOR that of the line. It begins a multiple of 1,024 bytes, plus 32 for each 16 of depth. What
// is added to it counts pieces.
inline unsigned columns_at(const Piece* at) {
  return (shared_place(at) >> 4 & 0x3fff) | 1 << 16;
}

#define EIGHT(i) \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define TILE(N, TYPE, PTX, SUMS, ROWS, ...) \
  inline void multiply_tile( \
      float (&sums)[N / 2], const unsigned* rows, unsigned columns, TYPE) { \
    const unsigned long long whole = 0x40000040ull << 32 | columns; \
    asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" SUMS "}, " ROWS \
                 ", adds, 1, 1, 0;\n}" \
                 : __VA_ARGS__ \
                 : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(whole)); \
  }
#define TILES_OF(N, ...) \
  TILE(N, __nv_bfloat16, "bf16", __VA_ARGS__) \
  TILE(N, __half, "f16", __VA_ARGS__)
#define FIRST_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FIRST_16 FIRST_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FIRST_32 \
  FIRST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FIRST_64 \
  FIRST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
           ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FIRST_128 \
  FIRST_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
           ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
           ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
           ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Adds to sums the products of a warpgroup's rows and columns; `publish`, `begin_tiles` and
// `end_tiles` order them. A lane has the numbers of `multiply` for its warp's 16 rows, and its sums.
TILES_OF(16, FIRST_8, "{%8,%9,%10,%11}, %12", EIGHT(0))
TILES_OF(32, FIRST_16, "{%16,%17,%18,%19}, %20", EIGHT(0), EIGHT(8))
TILES_OF(64, FIRST_32, "{%32,%33,%34,%35}, %36", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
TILES_OF(
    128, FIRST_64, "{%64,%65,%66,%67}, %68", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32),
    EIGHT(40), EIGHT(48), EIGHT(56))
TILES_OF(
    256, FIRST_128, "{%128,%129,%130,%131}, %132", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24),
    EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88),
    EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120))

// Lets products read what the thread has written to shared memory.
inline void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits for the first threads of the threadgroup, so many.
template <int THREADS>
inline void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Changes how many registers each thread of a warpgroup has (PTX ISA, setmaxnreg): those that some
// give, others take.
template <int COUNT>
inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Keeps a place in a register. The compiler would go on from it to a place of its own for each copy,
// for which there are too few registers.
template <typename T>
inline void keep(const T*& place) {
  asm volatile("" : "+l"(place));
}

// Begins a group of products.
inline void begin_tiles() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

inline void end_tiles() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all groups except the last N.
template <int N>
inline void await_tiles() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Waits for all groups. Sums are not read before: the compiler would move some of them to other
// registers, and let every product wait for the one before.
template <int N>
inline void await_sums(float (&sums)[N]) {
  await_tiles<0>();
#pragma unroll
  for (int i = 0; i < N; i++) {
    asm volatile("" : "+f"(sums[i])::"memory");
  }
}

// Prepares what threads wait at until others, so many, and copies have arrived; one thread does it,
// before a barrier.
inline void open_arrival(unsigned long long* arrival, int threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_place(arrival)), "r"(threads)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives if it is true: what the thread has written before is seen by those that wait. With a branch
// around it, products before and after it would wait for each other.
inline void arrive(unsigned long long* arrival, bool does) {
  asm volatile("{\n.reg .pred does;\nsetp.ne.b32 does, %1, 0;\n"
               "@does mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_place(arrival)),
               "r"((int)does)
               : "memory");
}

// Arrives, and announces the bytes of the next copies; one thread does it before these.
inline void announce(unsigned long long* arrival, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_place(arrival)),
               "r"(bytes)
               : "memory");
}

// Starts a copy of a multiple of 16 bytes to shared memory.
inline void fetch_line(void* to, const void* from, int bytes, unsigned long long* arrival) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_place(to)),
      "l"(from), "r"(bytes), "r"(shared_place(arrival))
      : "memory");
}

// Waits until all have arrived: for the first time, the third and so on with parity 0, for others
// with 1.
inline void await_arrival(unsigned long long* arrival, int parity) {
  asm volatile("{\n.reg .pred arrived;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
               "@!arrived bra again;\n}" ::"r"(shared_place(arrival)),
               "r"(parity)
               : "memory");
}
