// One thread copies VEC elements of one position's key or value in one head from the pool into
// dense [B, K, S, D] or [B, K, S, V].
typedef Chunk<T, VEC> Piece;
constexpr int KEY_CHUNKS = D / VEC;
constexpr int CHUNKS = KEY_CHUNKS + V / VEC;
const Place thread_index = thread_position_in_grid.x;
const int span = table_shape[1] * BLOCK_SIZE;
const Place to = thread_index / CHUNKS;
const int chunk = thread_index % CHUNKS;
const int position = to % span;
const int head = to / span % KV_HEADS;
const Place row = to / span / KV_HEADS;
if (row < table_shape[0]) {
  const Place block = table[row * table_shape[1] + position / BLOCK_SIZE];
  const Place from = (block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE;
  const bool is_key = chunk < KEY_CHUNKS;
  const int dim = is_key ? D : V;
  const int at = (is_key ? chunk : chunk - KEY_CHUNKS) * VEC;
#if BITS
  typedef Chunk<unsigned, VEC * BITS / 32> Stored;
  typedef Chunk<M, 2> Scale;
  const Place place = from * (dim * BITS / 32) + at * BITS / 32;
  const Place group = from * ((dim + GROUP - 1) / GROUP) + at / GROUP;
  const Stored raw = *(const device Stored*)((is_key ? key_pool : value_pool) + place);
  const auto scales = is_key ? key_scale_pool : value_scale_pool;
  const Scale scale = *(const device Scale*)(scales + group * 2);
  float wide[VEC];
  dequantise<BITS>(wide, raw, scale);
  Piece piece;
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    piece.at[i] = T(wide[i]);
  }
#else
  const Piece piece = *(const device Piece*)((is_key ? key_pool : value_pool) + from * dim + at);
#endif
  *(device Piece*)((is_key ? keys : values) + to * dim + at) = piece;
}
