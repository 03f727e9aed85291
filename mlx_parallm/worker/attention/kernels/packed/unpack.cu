// A thread unpacks 8 neighbouring numbers of a weight, PIECES times.
#if MXFP4
using Format = Mxfp4<T>;
#elif BITS == 4
using Format = Affine4<T>;
#else
using Format = Affine8<T>;
#endif
using Scale = Format::Scale;
const Place begin = (Place)blockIdx.x * THREADS * PIECES + threadIdx.x;
const Place end = (Place)weight_shape[0] * weight_shape[1] * 4 / BITS;
#pragma unroll
for (int j = 0; j < PIECES; j++) {
  const Place i = begin + j * THREADS;
  if (i < end) {
    const Place number = i * 8 / GROUP;
#if MXFP4
    const Group group = Format::group(((const Scale*)scales)[number], 0);
#else
    const Group group =
        Format::group(((const Scale*)scales)[number], ((const Scale*)biases)[number]);
#endif
    Piece values;
#pragma unroll
    for (int n = 0; n < 4; n++) {
#if BITS == 4
      const unsigned byte = weight[i] >> n * 8;
      values.at[n] = Format::two((byte & 0xf) | (byte & 0xf0) << 12, group, LEVELS);
#else
      const unsigned word = weight[i * 2 + n / 2];
      const unsigned selector = 0x7404 + n % 2 * 0x20;
      values.at[n] = Format::two(word, word, selector, selector + 16, group, BYTES);
#endif
    }
    ((Piece*)out)[i] = values;
  }
}
