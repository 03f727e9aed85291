// Products of 16 rows by 8, 16 deep, of pairs of 16-bit numbers (PTX ISA, mma.m16n8k16). A lane has
// numbers of rows lane / 4 and lane / 4 + 8.

// 8 numbers.
struct alignas(16) Piece {
  unsigned at[4];
};

// Loads what is not needed again.
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

// Two numbers as one word, the first in its lower half.
inline unsigned packed(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *(const unsigned*)&both;
}

inline unsigned packed(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *(const unsigned*)&both;
}

// 2 to the power of x; results and numbers too small to be normal are 0.
inline float power(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Has a piece come to shared memory while the thread goes on (PTX ISA, cp.async); zeros if there is
// none, and then nothing is read.
inline void fetch(Piece* to, const Piece* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (unsigned)__cvta_generic_to_shared(to)),
               "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

// The thread's fetches since the last call are a group.
inline void close_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of the thread's groups but the last N.
template <int N>
inline void await_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four times 8 rows of a piece, the first 8 from lanes 0 to 7 and so on; a lane gets of each two
// neighbouring rows of one column (PTX ISA, ldmatrix).
inline void load_columns(unsigned* to, const Piece* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(row)));
}
