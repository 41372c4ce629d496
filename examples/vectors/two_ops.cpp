// Two draft ops in plain C++, held to the suite's vectors: `advance` and greedy `verify_drafts`.
//
//   specgraph conformance vectors vectors --case kernels.advance --case kernels.verify-greedy
//   g++ -std=c++17 -O2 -o two_ops examples/vectors/two_ops.cpp
//   mkdir -p results && ./two_ops vectors results
//   specgraph conformance verify-vectors vectors results
//
// vectors.json describes each file. This program knows its two ops, and takes only their numbers from it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

struct Tensor {
  std::string dtype;  // of safetensors: F32, I32, I64
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  template <class T> T* data() { return reinterpret_cast<T*>(bytes.data()); }
};

using Tensors = std::map<std::string, Tensor>;

[[noreturn]] void fail(const std::string& text) {
  std::cerr << "two_ops: " << text << "\n";
  std::exit(1);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path + " can't be read");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// safetensors: the length of a JSON header in 8 bytes, the header, the data. Each entry of the header is
// "name":{"dtype":"I64","shape":[2,3],"data_offsets":[0,48]}
Tensors read_tensors(const std::string& path) {
  const std::string file = read_file(path);
  uint64_t length;
  std::memcpy(&length, file.data(), 8);
  const std::string header = file.substr(8, length);
  Tensors found;
  for (size_t at = header.find("{\"dtype\""); at != std::string::npos; at = header.find("{\"dtype\"", at + 1)) {
    const size_t end = header.rfind('"', at - 2), begin = header.rfind('"', end - 1) + 1;
    const std::string name = header.substr(begin, header.rfind('"', at) - begin);
    auto numbers = [&](const char* key) {
      std::vector<int64_t> out;
      size_t from = header.find('[', header.find(key, at)) + 1;
      std::stringstream list(header.substr(from, header.find(']', from) - from));
      for (std::string each; std::getline(list, each, ',');) out.push_back(std::stoll(each));
      return out;
    };
    Tensor tensor;
    const size_t dtype = header.find(":\"", at) + 2;
    tensor.dtype = header.substr(dtype, header.find('"', dtype) - dtype);
    tensor.shape = numbers("\"shape\"");
    const auto place = numbers("\"data_offsets\"");
    const auto data = file.begin() + 8 + static_cast<int64_t>(length);
    tensor.bytes.assign(data + place[0], data + place[1]);
    found[name] = tensor;
  }
  return found;
}

void write_tensors(const std::string& path, const Tensors& tensors) {
  std::string header = "{", data;
  for (const auto& [name, tensor] : tensors) {
    header += header.size() > 1 ? ",\"" : "\"";
    header += name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[";
    for (size_t i = 0; i < tensor.shape.size(); i++) header += (i ? "," : "") + std::to_string(tensor.shape[i]);
    header += "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
    data.append(tensor.bytes.begin(), tensor.bytes.end());
    header += std::to_string(data.size()) + "]}";
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8);
  file << header << data;
  if (!file) fail(path + " can't be written");
}

// A number of the first call of a case, from vectors.json.
int64_t number_of(const std::string& index, const std::string& id, const std::string& name) {
  const size_t at = index.find("\"" + name + "\": ", index.find("\"id\": \"" + id + "\""));
  if (at == std::string::npos) fail("vectors.json has no number " + name + " of " + id);
  return std::stoll(index.substr(at + name.size() + 4));
}

// Move the one row of each live request one token forward, in place.
void advance(Tensors& t, const std::string& call, int64_t max_model_len, int64_t block_size) {
  Tensor& table = t[call + "block_table"];
  auto* lengths = t[call + "seq_lens"].data<int32_t>();
  auto* positions = t[call + "positions"].data<int64_t>();
  auto* slots = t[call + "slot_mapping"].data<int64_t>();
  for (int64_t r = 0; r < table.shape[0]; r++) {
    const bool live = lengths[r] > 0;
    lengths[r] += live;
    const int64_t position = live ? lengths[r] - 1 : 0;
    const bool inside = live && position < max_model_len;
    const int64_t block = inside ? table.data<int32_t>()[r * table.shape[1] + position / block_size] : 0;
    positions[r] = std::min(position, max_model_len - 1);
    slots[r] = block ? block * block_size + position % block_size : -1;  // block 0 is the null block
  }
  t[call + "draft_step"].data<int64_t>()[0] += 1;
}

// Accept drafts while they are the target's most likely tokens; its own token follows, then -1.
void verify_greedy(Tensors& t, const std::string& call) {
  Tensor &logits = t[call + "target_logits"], &drafts = t[call + "draft_token_ids"];
  const int64_t requests = drafts.shape[0], k = drafts.shape[1], vocab = logits.shape[1];
  auto* sampled = t[call + "sampled.token_ids"].data<int64_t>();
  for (int64_t r = 0; r < requests; r++) {
    int64_t count = 0;
    bool goes_on = t[call + "start_positions"].data<int64_t>()[r] >= 0;  // -1: an inert request
    for (int64_t column = 0; column <= k; column++) {
      const float* row = logits.data<float>() + (r * (k + 1) + column) * vocab;
      const int64_t best = std::max_element(row, row + vocab) - row;  // of equals the first
      sampled[r * (k + 1) + column] = goes_on ? best : -1;
      count += goes_on;
      goes_on = goes_on && column < k && drafts.data<int64_t>()[r * k + column] == best;
    }
    t[call + "sampled.num_sampled"].data<int32_t>()[r] = static_cast<int32_t>(count);
  }
}

int main(int argc, char** argv) {
  if (argc != 3) fail("two_ops VECTORS RESULTS: the folder of the vectors, and an existing one for the results");
  const std::string vectors = std::string(argv[1]) + "/", results = std::string(argv[2]) + "/";
  const std::string index = read_file(vectors + "vectors.json");

  const std::string steps = "kernels.advance_9_.safetensors", verify = "kernels.verify-greedy.safetensors";
  Tensors in = read_tensors(vectors + steps);
  const int64_t limit = number_of(index, "kernels.advance[9]", "max_model_len");
  const int64_t block = number_of(index, "kernels.advance[9]", "block_size");
  for (int call = 0; in.count(std::to_string(call) + ".seq_lens"); call++)
    advance(in, std::to_string(call) + ".", limit, block);
  write_tensors(results + steps, in);

  in = read_tensors(vectors + verify);
  for (int call = 0; in.count(std::to_string(call) + ".target_logits"); call++)
    verify_greedy(in, std::to_string(call) + ".");
  write_tensors(results + verify, in);
}
