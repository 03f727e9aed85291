// One thread writes VEC elements of one token's key or value in one head. The pools are inputs that
// are written in place: an output would be a copy. Every reader depends on `token`.
typedef Chunk<T, VEC> Piece;
constexpr int KEY_CHUNKS = D / VEC;
constexpr int CHUNKS = KEY_CHUNKS + V / VEC;
const int thread_index = thread_position_in_grid.x;
const int row = thread_index / (KV_HEADS * CHUNKS);
const int head = thread_index / CHUNKS % KV_HEADS;
const int chunk = thread_index % CHUNKS;
if (row < slots_shape[0] && slots[row] >= 0) {
  const Place from = (Place)row * KV_HEADS + head;
  const Place block = slots[row] / BLOCK_SIZE;
  const Place to = (block * KV_HEADS + head) * BLOCK_SIZE + slots[row] % BLOCK_SIZE;
  const bool is_key = chunk < KEY_CHUNKS;
  const int dim = is_key ? D : V;
  const int at = (is_key ? chunk : chunk - KEY_CHUNKS) * VEC;
  const Piece piece = *(const device Piece*)((is_key ? keys : values) + from * dim + at);
  *(device Piece*)((is_key ? key_pool : value_pool) + to * dim + at) = piece;
}
if (thread_index == 0) {
  token[0] = previous[0] + 1;
}
