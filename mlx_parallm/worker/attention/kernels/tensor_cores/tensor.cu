// Products of 16 rows with 8 columns, 16 deep, of 16-bit numbers in pairs (PTX ISA, mma.m16n8k16).
// A lane has numbers of rows lane / 4 and lane / 4 + 8.

// Eight numbers that are loaded at once.
struct alignas(16) Piece {
  unsigned at[4];
};

// Loads numbers that are not needed again, so that the cache evicts them first.
inline Piece stream(const Piece* from) {
  const uint4 all = __ldcs((const uint4*)from);
  return {{all.x, all.y, all.z, all.w}};
}

inline void multiply(
    float* sums, const unsigned* upper, const unsigned* lower, const unsigned* x, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "r"(x[0]), "r"(x[1]));
}

inline void multiply(
    float* sums, const unsigned* upper, const unsigned* lower, const unsigned* x, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "r"(x[0]), "r"(x[1]));
}

// Packs two numbers into one word, the first in its lower half.
inline unsigned packed(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *(const unsigned*)&both;
}

inline unsigned packed(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *(const unsigned*)&both;
}

// Returns another lane's number.
inline float from_lane(float x, int lane) { return __shfl_sync(0xffffffff, x, lane); }

// Returns 2 to the power of x; 0 for subnormal results and numbers.
inline float power(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Starts an asynchronous copy of a piece to shared memory (PTX ISA, cp.async). If there is no
// piece, it writes zeros and reads nothing.
inline void fetch(Piece* to, const Piece* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (unsigned)__cvta_generic_to_shared(to)),
               "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

// Ends a group: the thread's copies since the last call.
inline void close_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of the thread's groups except the last N.
template <int N>
inline void await_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Loads four times 8 rows of a piece, whose addresses are in lanes 0 to 7 and so on; of each, a
// lane gets two neighbouring rows of one column (PTX ISA, ldmatrix).
inline void load_columns(unsigned* to, const Piece* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(row)));
}
