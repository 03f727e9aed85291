// One thread: VEC elements of one token's key or value in one head. The pools are inputs written
// in place: an output would be a copy. Whatever reads them depends on `token`.
typedef Chunk<T, VEC> Piece;
constexpr int KEY_CHUNKS = D / VEC;
constexpr int CHUNKS = KEY_CHUNKS + V / VEC;
const int thread_index = blockIdx.x * THREADS + threadIdx.x;
const int row = thread_index / (KV_HEADS * CHUNKS);
const int head = thread_index / CHUNKS % KV_HEADS;
const int chunk = thread_index % CHUNKS;
if (row < slots_shape[0] && slots[row] >= 0) {
  const Place from = (Place)row * KV_HEADS + head;
  const Place block = slots[row] / BLOCK_SIZE;
  const Place to = (block * KV_HEADS + head) * BLOCK_SIZE + slots[row] % BLOCK_SIZE;
  if (chunk < KEY_CHUNKS) {
    const int at = chunk * VEC;
    *(Piece*)(key_pool + to * D + at) = *(const Piece*)(keys + from * D + at);
  } else {
    const int at = (chunk - KEY_CHUNKS) * VEC;
    *(Piece*)(value_pool + to * V + at) = *(const Piece*)(values + from * V + at);
  }
}
if (thread_index == 0) {
  token[0] = previous[0] + 1;
}
