// The write kernel of a quantised pool. GROUP elements of one token's key or value in one head
// share a step and a least value; one thread has VEC of them, and LANES threads of a warp share a
// group.
typedef Chunk<unsigned, VEC * sizeof(T) / 4> Piece;
typedef Chunk<unsigned, VEC * BITS / 32> Stored;
typedef Chunk<M, 2> Scale;
constexpr int LANES = GROUP / VEC;
constexpr int KEY_GROUPS = (D + GROUP - 1) / GROUP;
constexpr int GROUPS = KEY_GROUPS + (V + GROUP - 1) / GROUP;
constexpr float LEVELS = (1 << BITS) - 1;
const int thread_index = thread_position_in_grid.x;
const int lane = thread_index % LANES;
const int row = thread_index / (KV_HEADS * GROUPS * LANES);
const int head = thread_index / (GROUPS * LANES) % KV_HEADS;
const int nth = thread_index / LANES % GROUPS;
const bool is_key = nth < KEY_GROUPS;
const int group = is_key ? nth : nth - KEY_GROUPS;
const int dim = is_key ? D : V;
const int at = group * GROUP + lane * VEC;
const bool is_mine = row < slots_shape[0] && slots[row] >= 0 && at < dim;

// 1. Find the least and the largest element of a group. Lanes without elements take part as well.
float wide[VEC];
float least = -LEAST;
float most = LEAST;
if (is_mine) {
  const Place from = (Place)row * KV_HEADS + head;
  const Piece piece = *(const device Piece*)((is_key ? keys : values) + from * dim + at);
  widen(wide, piece, T(0.0f));
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    least = fmin(least, wide[i]);
    most = fmax(most, wide[i]);
  }
}
#pragma unroll
for (int far = LANES / 2; far > 0; far /= 2) {
  least = fmin(least, simd_shuffle_xor(least, far));
  most = fmax(most, simd_shuffle_xor(most, far));
}

// 2. Count levels above the least value as stored, in steps as stored.
if (is_mine) {
  Scale scale;
  scale.at[1] = M(least);
  scale.at[0] = M((most - float(scale.at[1])) / LEVELS);
  const float step = float(scale.at[0]);
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  Stored stored = {};
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    const float level = rint((wide[i] - float(scale.at[1])) * inverse);
    const unsigned bits = (unsigned)fmin(fmax(level, 0.0f), LEVELS);
    stored.at[i * BITS / 32] |= bits << (i * BITS % 32);
  }
  const Place block = slots[row] / BLOCK_SIZE;
  const Place to = (block * KV_HEADS + head) * BLOCK_SIZE + slots[row] % BLOCK_SIZE;
  const Place place = to * (dim * BITS / 32) + at * BITS / 32;
  *(device Stored*)((is_key ? key_pool : value_pool) + place) = stored;
  if (lane == 0) {
    const auto scales = is_key ? key_scale_pool : value_scale_pool;
    const int groups = is_key ? KEY_GROUPS : GROUPS - KEY_GROUPS;
    *(device Scale*)(scales + (to * groups + group) * 2) = scale;
  }
}
if (thread_index == 0) {
  token[0] = previous[0] + 1;
}
