// One thread multiplies VEC neighbouring numbers of a row by SiLU of their gates (SwiGLU). Gates and
// numbers are columns of one product or of two. It rounds as MLX's operations round.
typedef Chunk<T, VEC> Piece;
constexpr int PIECES = SIZE / VEC;
const Place index = (Place)blockIdx.x * WARPS * 32 + threadIdx.x;
const Place row = index / PIECES;
const int at = index % PIECES * VEC;
if (row < gates_shape[0]) {
  const Piece gate = *(const Piece*)(gates + row * gates_shape[2] + FIRST_GATE + at);
  const Piece number = *(const Piece*)(numbers + row * numbers_shape[2] + FIRST_NUMBER + at);
  Piece product;
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    const float x = float(gate.at[i]);
    const float sigmoid = float(T(1.0f / (1.0f + exp2f(-x * LOG2E))));
    product.at[i] = T(float(T(x * sigmoid)) * float(number.at[i]));
  }
  *(Piece*)(products + row * SIZE + at) = product;
}
