// Zeros, in which the threadgroups of the next launch count arrivals. x orders the launches.
if (threadIdx.x < SIZE) {
  counts[threadIdx.x] = 0;
}
