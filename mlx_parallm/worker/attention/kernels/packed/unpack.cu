// A thread unpacks 8 neighbouring numbers of a weight, PIECES times. It reads all before it writes
// any: the compiler does not know that what it writes is elsewhere.
#if MXFP4
using Format = Mxfp4<T>;
#elif BITS == 4
using Format = Affine4<T>;
#else
using Format = Affine8<T>;
#endif
using Scale = Format::Scale;
constexpr int WORDS = BITS / 4;
const Place begin = (Place)blockIdx.x * THREADS * PIECES + threadIdx.x;
const Place end = (Place)weight_shape[0] * weight_shape[1] / WORDS;
unsigned words[PIECES][WORDS];
Group groups[PIECES];
#pragma unroll
for (int j = 0; j < PIECES; j++) {
  const Place own = begin + j * THREADS;
  const Place i = own < end ? own : end - 1;
  const Place number = i * 8 / GROUP;
#pragma unroll
  for (int n = 0; n < WORDS; n++) {
    words[j][n] = weight[i * WORDS + n];
  }
#if MXFP4
  groups[j] = Format::group(((const Scale*)scales)[number], 0);
#else
  groups[j] = Format::group(((const Scale*)scales)[number], ((const Scale*)biases)[number]);
#endif
}
#pragma unroll
for (int j = 0; j < PIECES; j++) {
  Piece values;
#pragma unroll
  for (int n = 0; n < 4; n++) {
#if BITS == 4
    const unsigned byte = words[j][0] >> n * 8;
    values.at[n] = Format::two((byte & 0xf) | (byte & 0xf0) << 12, groups[j], LEVELS);
#else
    const unsigned word = words[j][n / 2];
    const unsigned selector = 0x7404 + n % 2 * 0x20;
    values.at[n] = Format::two(word, word, selector, selector + 16, groups[j], BYTES);
#endif
  }
  if (begin + j * THREADS < end) {
    ((Piece*)out)[begin + j * THREADS] = values;
  }
}
