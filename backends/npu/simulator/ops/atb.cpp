// libatb.so: the part of the ATB library's C++ interface that torch_npu's libop_plugin_atb.so is linked against, and one
// operation of it, paged attention. The members and their order are those that CANN's documents of the ATB interface
// give (8.5: ascendtb_01_0184 for the parameters, 0202 for the tensors), checked against what the wheel passes.
#include <cmath>

#include "../runtime/limits.h"
#include "op.h"

namespace atb {

struct TensorDesc {
  int type, format;
  int64_t sizes[8];
  uint64_t dims;
};
struct Tensor {
  TensorDesc desc;
  void *device, *host;  // one of them is set
  uint64_t bytes;
};
struct Tensors {  // a vector with room for 64, on the heap where it was reserved for more
  size_t capacity, size;
  Tensor own[65];
  Tensor* heap;
  const Tensor& operator[](size_t i) const { return heap ? heap[i] : own[i]; }
};
struct VariantPack {
  Tensors in, out;
};

class Context {
 public:
  virtual ~Context() = default;
  virtual int SetExecuteStream(aclrtStream stream) { return stream_ = stream, 0; }
  virtual aclrtStream GetExecuteStream() const { return stream_; }
  virtual int SetAsyncTilingCopyStatus(bool) { return 0; }
  virtual bool GetAsyncTilingCopyStatus() const { return false; }

 private:
  aclrtStream stream_ = nullptr;
};

class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::string GetName() const = 0;
  virtual int InferShape(const void*, void*) const { return acl::kUnsupported; }
  virtual uint32_t GetInputNum() const = 0;
  virtual uint32_t GetOutputNum() const = 0;
  virtual int Setup(const VariantPack& pack, uint64_t& workspace, Context* context) = 0;
  virtual int Execute(const VariantPack& pack, uint8_t* workspace, uint64_t bytes, Context* context) = 0;
};

namespace infer {
struct PagedAttentionParam {
  int32_t heads;
  float scale;
  int32_t kv_heads;
  int mask;
  bool batch_status;
  int quant, out_type;
  bool quant_offset;
  int compress, calc, scale_type, layout;
  uint32_t latent_value_size;
};
struct LinearParam { bool transpose_a, transpose_b; };
struct ElewiseParam;
struct RmsNormParam;
struct GroupTopkParam;
struct SelfAttentionParam;
struct ReshapeAndCacheParam { int compress, config; };
struct RopeParam { int32_t coefficient, format; };
}  // namespace infer

namespace {

using op::TensorHandle;

std::string text(int64_t n) { return std::to_string(n); }

TensorHandle handle(const Tensor& t) {
  op::Ints sizes(t.desc.sizes, t.desc.sizes + t.desc.dims), strides(t.desc.dims);
  int64_t step = 1;
  for (size_t i = sizes.size(); i--; step *= sizes[i]) strides[i] = step;
  return {t.device, sizes, strides, 0, t.desc.type};
}

// One row per sequence: row i sees the first context_lens[i] keys of row i of the block table.
class PagedAttention : public Operation {
 public:
  explicit PagedAttention(const infer::PagedAttentionParam& param) : param_(param) {}
  std::string GetName() const override { return kName; }
  uint32_t GetInputNum() const override { return 5; }
  uint32_t GetOutputNum() const override { return 1; }

  int Setup(const VariantPack& pack, uint64_t& workspace, Context*) override {
    try {
      workspace = check(pack);
    } catch (const std::exception& e) {
      return op::refuse(kName, e.what());
    }
    return acl::kSuccess;
  }

  int Execute(const VariantPack& pack, uint8_t* workspace, uint64_t bytes, Context* context) override {
    SIM_API(PagedAttentionOperation);
    auto made = std::make_unique<op::Executor>();
    for (int i = 0; i < 4; i++) made->tensors.push_back(handle(pack.in[i]));
    made->tensors.push_back(handle(pack.out[0]));
    made->name = kName;
    made->workspace = check(pack);
    made->run = [p = param_, t = made->tensors, lengths = lengths_of(pack.in[4])] {
      op::prepare_thread();
      at::NoGradGuard no_grad;
      attend(p, op::look(t[0]), op::look(t[1]), op::look(t[2]), op::look(t[3]), lengths, op::look(t[4]));
    };
    sim::add_handle(made.get(), sim::Kind::executor);
    return op::launch(workspace, bytes, made.release(), context->GetExecuteStream());
  }

 private:
  static constexpr const char* kName = "PagedAttentionOperation";

  static op::Ints lengths_of(const Tensor& t) {
    auto* first = static_cast<const int32_t*>(t.host);
    return op::Ints(first, first + t.desc.sizes[0]);
  }

  // Throws what is wrong; returns the workspace in bytes.
  uint64_t check(const VariantPack& pack) const {
    auto bad = [](const std::string& why) { throw std::runtime_error(why); };
    if (pack.in.size != 5 || pack.out.size != 1)
      bad(text(pack.in.size) + " inputs and " + text(pack.out.size) + " outputs, not 5 and 1");
    auto query = handle(pack.in[0]), key = handle(pack.in[1]), value = handle(pack.in[2]), table = handle(pack.in[3]);
    auto& lens = pack.in[4];
    if (param_.mask || param_.batch_status || param_.quant || param_.compress || param_.calc || param_.scale_type ||
        param_.layout || param_.latent_value_size)
      bad("masks, quantization and other layouts are not simulated");
    if (!lens.host || lens.desc.type != acl::kInt32) bad("context_lens must be int32 in host memory");
    if (query.sizes.size() != 3 || key.sizes.size() != 4 || value.sizes != key.sizes)
      bad("query must be [tokens, heads, head_size], both caches [blocks, block_size, kv heads, head_size]");
    int64_t rows = query.sizes[0], dim = query.sizes[2], block = key.sizes[1], longest = 0;
    if (query.sizes[1] != param_.heads || key.sizes[2] != param_.kv_heads || param_.heads % param_.kv_heads)
      bad(text(param_.heads) + " heads over " + text(param_.kv_heads) + " kv heads");
    if (key.type != query.type || value.type != query.type || pack.out[0].desc.type != query.type)
      bad("query, caches and output differ in dtype");
    if (table.type != acl::kInt32 || table.sizes.size() != 2 || table.sizes[0] != rows || lens.desc.sizes[0] != rows)
      bad("block_table and context_lens must have a row per token, " + text(rows));
    for (auto length : lengths_of(lens)) {
      if (length < 0 || length > table.sizes[1] * block)
        bad("a context of " + text(length) + " tokens, there is room for " + text(table.sizes[1] * block));
      longest = std::max(longest, length);
    }
    if (sim::is_on(sim::Limit::atb_paged)) {
      auto refuse = [&](const std::string& why) { bad(sim::by_limit(sim::Limit::atb_paged, why)); };
      if (query.type != acl::kHalf && query.type != acl::kBFloat16) refuse("query is neither float16 nor bfloat16");
      if (block % 16) refuse("block_size " + text(block));
      if (dim > 256 || dim * block > 128 * 128) refuse("head_size " + text(dim) + ", block_size " + text(block));
    }
    return static_cast<uint64_t>((rows * param_.heads * longest * 4 / 512 + 1) * 512);
  }

  static void attend(const infer::PagedAttentionParam& p, at::Tensor query, at::Tensor key, at::Tensor value,
                     at::Tensor table, const op::Ints& lengths, at::Tensor out) {
    for (size_t row = 0; row < lengths.size(); row++) {
      if (!lengths[row]) {
        out[row].zero_();
        continue;
      }
      auto ids = table[row].slice(0, 0, (lengths[row] + key.size(1) - 1) / key.size(1)).to(at::kLong);
      if (ids.min().item<int64_t>() < 0 || ids.max().item<int64_t>() >= key.size(0))
        throw std::runtime_error("block_table row " + text(row) + " names a block outside of the cache");
      auto seen = [&](const at::Tensor& cache) {  // [heads, keys, dim]
        auto rows = cache.index_select(0, ids).flatten(0, 1).slice(0, 0, lengths[row]).to(at::kFloat).transpose(0, 1);
        return rows.repeat_interleave(p.heads / p.kv_heads, 0);
      };
      auto scores = at::matmul(seen(key), query[row].to(at::kFloat).unsqueeze(2)).squeeze(2) * p.scale;
      out[row].copy_(at::matmul(scores.softmax(1).unsqueeze(1), seen(value)).squeeze(1));
    }
  }

  infer::PagedAttentionParam param_;
};

// Operations without parameters that matter here: `run` gets the tensors in, then those out.
class Simple : public Operation {
 public:
  using Run = void (*)(std::vector<at::Tensor>);
  Simple(const char* name, uint32_t in, uint32_t out, Run run) : name_(name), in_(in), out_(out), run_(run) {}
  std::string GetName() const override { return name_; }
  uint32_t GetInputNum() const override { return in_; }
  uint32_t GetOutputNum() const override { return out_; }
  int Setup(const VariantPack& pack, uint64_t& workspace, Context*) override {
    workspace = 0;
    if (pack.in.size != in_ || pack.out.size != out_) return op::refuse(name_, "another number of tensors");
    return acl::kSuccess;
  }
  int Execute(const VariantPack& pack, uint8_t* workspace, uint64_t bytes, Context* context) override {
    auto made = std::make_unique<op::Executor>();
    for (uint32_t i = 0; i < in_; i++) made->tensors.push_back(handle(pack.in[i]));
    for (uint32_t i = 0; i < out_; i++) made->tensors.push_back(handle(pack.out[i]));
    made->name = name_;
    made->workspace = 0;
    made->run = [run = run_, t = made->tensors] {
      op::prepare_thread();
      at::NoGradGuard no_grad;
      std::vector<at::Tensor> seen;
      for (auto& each : t) seen.push_back(each.data ? op::look(each) : at::Tensor());
      run(seen);
    };
    sim::add_handle(made.get(), sim::Kind::executor);
    return op::launch(workspace, bytes, made.release(), context->GetExecuteStream());
  }

 private:
  const char* name_;
  uint32_t in_, out_;
  Run run_;
};

// query, key, cos, sin, lengths -> rotated query and key; the halves of each head are a pair
void rotate(std::vector<at::Tensor> t) {
  int64_t dim = t[2].size(-1);
  for (int i = 0; i < 2; i++) {
    auto x = t[i].reshape({t[i].size(0), -1, dim}).to(at::kFloat);
    auto halves = x.chunk(2, -1);
    auto cos = t[2].reshape({-1, 1, dim}).to(at::kFloat), sin = t[3].reshape({-1, 1, dim}).to(at::kFloat);
    auto turned = x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
    t[5 + i].copy_(turned.reshape(t[5 + i].sizes()));
  }
}

// x, weight, sum -> sum + x^T weight
void add_product(std::vector<at::Tensor> t) {
  t[3].copy_(t[2] + at::mm(t[0].t().to(at::kFloat), t[1].to(at::kFloat)));
}

// key, value, key cache, value cache, slots -> both caches; a negative slot is skipped
void write_cache(std::vector<at::Tensor> t) {
  auto slots = t[4].to(at::kLong);
  auto kept = at::nonzero(slots.ge(0)).flatten();
  for (int i = 0; i < 2; i++)
    t[2 + i].flatten(0, 1).index_copy_(0, slots.index_select(0, kept), t[i].index_select(0, kept));
}

}  // namespace

int CreateContext(Context** context) { return *context = new Context, acl::kSuccess; }
int DestroyContext(Context* context) { return delete context, acl::kSuccess; }
int DestroyOperation(Operation* operation) { return delete operation, acl::kSuccess; }

template <class Param>
int CreateOperation(const Param&, Operation** made) {
  *made = nullptr;
  return op::refuse("CreateOperation", "of the ATB operations only PagedAttention is simulated");
}
template <>
int CreateOperation(const infer::PagedAttentionParam& param, Operation** made) {
  return *made = new PagedAttention(param), acl::kSuccess;
}
template <>
int CreateOperation(const infer::RopeParam& param, Operation** made) {
  if (param.coefficient != 2) return op::refuse("RopeOperation", "only halves are simulated");
  return *made = new Simple("RopeOperation", 5, 2, rotate), acl::kSuccess;
}
template <>
int CreateOperation(const infer::ReshapeAndCacheParam& param, Operation** made) {
  return *made = new Simple("ReshapeAndCacheOperation", 5, 2, write_cache), acl::kSuccess;
}
template <>
int CreateOperation(const infer::LinearParam& param, Operation** made) {
  return *made = new Simple("LinearOperation", 3, 1, add_product), acl::kSuccess;
}
template int CreateOperation(const infer::ElewiseParam&, Operation**);
template int CreateOperation(const infer::RmsNormParam&, Operation**);
template int CreateOperation(const infer::GroupTopkParam&, Operation**);
template int CreateOperation(const infer::SelfAttentionParam&, Operation**);


struct Utils {
  static uint64_t GetTensorSize(const Tensor& tensor);
};
uint64_t Utils::GetTensorSize(const Tensor& tensor) {
  uint64_t bytes = op::scalar_type(tensor.desc.type) == at::kBool ? 1 : c10::elementSize(op::scalar_type(tensor.desc.type));
  for (uint64_t i = 0; i < tensor.desc.dims; i++) bytes *= tensor.desc.sizes[i];
  return bytes;
}

}  // namespace atb
