// One thread: VEC elements of one position's key or value in one head, from the pool into dense
// [B, K, S, D] and [B, K, S, V].
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
  if (chunk < KEY_CHUNKS) {
    const int at = chunk * VEC;
    *(device Piece*)(keys + to * D + at) = *(const device Piece*)(key_pool + from * D + at);
  } else {
    const int at = (chunk - KEY_CHUNKS) * VEC;
    *(device Piece*)(values + to * V + at) = *(const device Piece*)(value_pool + from * V + at);
  }
}
