// A convolution along the tokens, each channel for itself: one thread computes one channel of one
// output from WIDTH tokens.
const Place place = (Place)blockIdx.x * THREADS + threadIdx.x;
const int channels = x_shape[2];
const int num_outputs = x_shape[1] - WIDTH + 1;
if (place < (Place)x_shape[0] * num_outputs * channels) {
  const int channel = place % channels;
  const Place output = place / channels;
  const Place token = output / num_outputs * x_shape[1] + output % num_outputs;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    sum += float(x[(token + i) * channels + channel]) * float(weight[channel * WIDTH + i]);
  }
  y[place] = T(sum);
}
