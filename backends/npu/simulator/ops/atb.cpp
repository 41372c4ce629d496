// libatb.so: the part of the ATB library's C++ interface that torch_npu's libop_plugin_atb.so is linked against, and the
// operations of it that engines call: paged attention, rotary embedding, cache writes, a sum of products. The members and
// their order are those that CANN's documents of the ATB interface give (8.5: ascendtb_01_0184 for the parameters, 0202
// for the tensors), checked against what the wheel passes. The checks of the last three are those of
// hicann/ascend-transformer-boost at ddcc8b6 (2026-07-22); their dtypes are in its ops_configs/atb_ops_info.ini.
#include <cmath>
#include <set>

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
struct LinearParam {
  bool transpose_a, transpose_b, bias;
  int out_type;
  bool accumulate;
};
struct ElewiseParam;
struct RmsNormParam;
struct GroupTopkParam;
struct SelfAttentionParam;
struct ReshapeAndCacheParam {
  int compress, caches;
};
struct RopeParam {
  int32_t coefficient, cos_format;
};
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

// An operation whose tensors all lie in device memory. `check` gets those in, then those out, and throws what is wrong
// with them; `compute` gets them as CPU tensors.
struct Kind {
  const char* name;
  uint32_t in, out;
  std::function<void(const std::vector<TensorHandle>&)> check;
  std::function<void(std::vector<at::Tensor>)> compute;
  sim::Counter* calls;
};

class OnDevice : public Operation {
 public:
  explicit OnDevice(Kind kind) : kind_(std::move(kind)) {}
  std::string GetName() const override { return kind_.name; }
  uint32_t GetInputNum() const override { return kind_.in; }
  uint32_t GetOutputNum() const override { return kind_.out; }

  int Setup(const VariantPack& pack, uint64_t& workspace, Context*) override {
    workspace = 0;
    try {
      if (pack.in.size != kind_.in || pack.out.size != kind_.out)
        throw std::runtime_error(text(pack.in.size) + " inputs and " + text(pack.out.size) + " outputs, not " +
                                 text(kind_.in) + " and " + text(kind_.out));
      kind_.check(tensors(pack));
    } catch (const std::exception& e) {
      return op::refuse(kind_.name, e.what());
    }
    return acl::kSuccess;
  }

  int Execute(const VariantPack& pack, uint8_t* workspace, uint64_t bytes, Context* context) override {
    kind_.calls->calls++;
    auto made = std::make_unique<op::Executor>();
    made->tensors = tensors(pack);
    made->name = kind_.name;
    made->workspace = 0;
    made->run = [compute = kind_.compute, t = made->tensors] {
      op::prepare_thread();
      at::NoGradGuard no_grad;
      std::vector<at::Tensor> seen;
      for (auto& each : t) seen.push_back(op::look(each));
      compute(seen);
    };
    sim::add_handle(made.get(), sim::Kind::executor);
    return op::launch(workspace, bytes, made.release(), context->GetExecuteStream());
  }

 private:
  std::vector<TensorHandle> tensors(const VariantPack& pack) const {
    std::vector<TensorHandle> all;
    for (uint32_t i = 0; i < kind_.in; i++) all.push_back(handle(pack.in[i]));
    for (uint32_t i = 0; i < kind_.out; i++) all.push_back(handle(pack.out[i]));
    return all;
  }

  Kind kind_;
};

using op::dtype_of;
using op::require;
using op::require_by;
using sim::Limit;

bool is_half(const TensorHandle& t) { return t.type == acl::kHalf || t.type == acl::kBFloat16; }

// query, key, cos, sin, number of tokens -> rotated query and key. Source of the checks: rope_operation.cpp, DimCheck,
// ParamCheck and HiddenSizeCheck. Coefficient 2 turns a head's halves, its size turns neighbours.
Kind rope(const infer::RopeParam& param) {
  static sim::Counter calls("RopeOperation");
  auto check = [coefficient = param.coefficient](const std::vector<TensorHandle>& t) {
    auto &query = t[0], &key = t[1], &cos = t[2], &sin = t[3], &tokens = t[4];
    require(query.sizes.size() == 2 && key.sizes.size() == 2 && cos.sizes.size() == 2 && tokens.sizes.size() == 1,
            "query, key, cos and sin must have two dimensions, the number of tokens one; others are not simulated");
    require(cos.sizes == sin.sizes && cos.type == sin.type, "cos and sin differ in shape or dtype");
    int64_t rows = query.sizes[0], dim = cos.sizes[1];
    require(key.sizes[0] == rows && cos.sizes[0] == rows,
            text(rows) + " rows of query, " + text(key.sizes[0]) + " of key, " + text(cos.sizes[0]) + " of cos");
    require(key.sizes[1] && query.sizes[1] % key.sizes[1] == 0 && key.sizes[1] % dim == 0,
            "query's " + text(query.sizes[1]) + " and key's " + text(key.sizes[1]) + " are no heads of " + text(dim));
    require(coefficient == 2 || coefficient == dim,
            "rotaryCoeff " + text(coefficient) + " is not simulated: 2, or the head's size");
    require(key.type == query.type && t[5].type == query.type && t[6].type == query.type,
            "query, key and the outputs differ in dtype");
    require(t[5].sizes == query.sizes && t[6].sizes == key.sizes, "the outputs have other shapes than query and key");
    require(tokens.type == acl::kInt32, "the number of tokens must be int32");
    bool taken = cos.type == query.type || (query.type == acl::kHalf && cos.type == acl::kFloat);
    require_by(Limit::atb_rope, is_half(query) && taken, "query is " + dtype_of(query) + ", cos " + dtype_of(cos));
    require_by(Limit::atb_rope, dim >= 16 && dim <= 4096, "heads of " + text(dim));
  };
  auto compute = [halves = param.coefficient == 2](std::vector<at::Tensor> t) {
    int64_t rows = t[2].size(0), dim = t[2].size(1);
    auto cos = t[2].unsqueeze(1).to(at::kFloat), sin = t[3].unsqueeze(1).to(at::kFloat);
    for (int i = 0; i < 2; i++) {
      auto x = t[i].reshape({rows, -1, dim}).to(at::kFloat);
      auto pairs = halves ? x.view({rows, x.size(1), 2, dim / 2}) : x.view({rows, x.size(1), dim / 2, 2});
      auto parts = pairs.unbind(halves ? 2 : 3);
      auto turned = at::stack({-parts[1], parts[0]}, halves ? 2 : 3).view_as(x);
      t[5 + i].copy_((x * cos + turned * sin).view_as(t[5 + i]));
    }
  };
  return {"RopeOperation", 5, 2, check, compute, &calls};
}

// key, value, their caches, slots -> the caches. Source of the checks: reshape_and_cache_operation.cpp, DimCheck and
// KVCacheDimCheck910B. Its kernel skips negative slots, as aclnnScatterPaKvCache's does (indexing.cpp).
Kind reshape_and_cache(const infer::ReshapeAndCacheParam& param) {
  static sim::Counter calls("ReshapeAndCacheOperation");
  require(!param.compress && !param.caches, "compressed caches, one cache alone and NZ caches are not simulated");
  auto check = [](const std::vector<TensorHandle>& t) {
    auto &key = t[0], &value = t[1], &key_cache = t[2], &value_cache = t[3], &slots = t[4];
    require(key.sizes.size() == 3 && value.sizes.size() == 3 && key_cache.sizes.size() == 4 && value_cache.sizes.size() == 4,
            "key and value must be [T, heads, dim], their caches [blocks, block_size, heads, dim]");
    require(slots.sizes == op::Ints{key.sizes[0]} && value.sizes[0] == key.sizes[0],
            text(key.sizes[0]) + " rows of key, " + text(value.sizes[0]) + " of value, " + text(slots.sizes[0]) + " slots");
    auto fits = [](const TensorHandle& rows, const TensorHandle& cache) {
      return rows.sizes[1] == cache.sizes[2] && rows.sizes[2] == cache.sizes[3] && rows.type == cache.type;
    };
    require(fits(key, key_cache) && fits(value, value_cache) && key.type == value.type,
            "rows and caches differ in heads, head size or dtype");
    require(key_cache.sizes[0] == value_cache.sizes[0] && key_cache.sizes[1] == value_cache.sizes[1],
            "the caches differ in blocks or block size");
    require(t[5].data == key_cache.data && t[6].data == value_cache.data, "the outputs are not the caches");
    require_by(Limit::atb_cache, is_half(key), "rows are " + dtype_of(key));
    require_by(Limit::atb_cache, slots.type == acl::kInt32, "slots are " + dtype_of(slots));
  };
  auto compute = [](std::vector<at::Tensor> t) {
    auto slots = t[4].to(at::kLong), kept = at::nonzero(slots.ge(0)).flatten(), used = slots.index_select(0, kept);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < used.size(0); i++) {
      int64_t slot = used[i].item<int64_t>();
      require(slot < t[2].size(0) * t[2].size(1), "slot " + text(slot) + " is past the cache");
      require_by(Limit::atb_cache, seen.insert(slot).second, "slot " + text(slot) + " twice");
    }
    for (int i = 0; i < 2; i++) t[2 + i].flatten(0, 1).index_copy_(0, used, t[i].index_select(0, kept));
  };
  return {"ReshapeAndCacheOperation", 5, 2, check, compute, &calls};
}

// x, weight, sum -> sum + x^T weight. Source of the checks: linear_operation.cpp and [LinearOperationMatmulAccum].
Kind linear(const infer::LinearParam& param) {
  static sim::Counter calls("LinearOperation");
  require(param.transpose_a && !param.transpose_b && !param.bias && param.accumulate,
          "of the linear operations only sum + x^T weight is simulated");
  auto check = [](const std::vector<TensorHandle>& t) {
    auto &x = t[0], &weight = t[1];
    require(is_half(x) && weight.type == x.type, "x and weight must be float16 or bfloat16, both the same");
    require(t[2].type == acl::kFloat && t[3].type == acl::kFloat, "the sum must be float32");
    require(x.sizes.size() == 2 && weight.sizes.size() == 2 && x.sizes[0] == weight.sizes[0],
            "x must be [k, m], weight [k, n]");
    require(t[2].sizes == op::Ints{x.sizes[1], weight.sizes[1]} && t[3].sizes == t[2].sizes, "the sum must be [m, n]");
  };
  auto compute = [](std::vector<at::Tensor> t) {
    t[3].copy_(t[2] + at::mm(t[0].t().to(at::kFloat), t[1].to(at::kFloat)));
  };
  return {"LinearOperation", 3, 1, check, compute, &calls};
}

template <class Param>
int create(const char* name, Kind (*kind)(const Param&), const Param& param, Operation** made) {
  try {
    *made = new OnDevice(kind(param));
  } catch (const std::exception& e) {
    *made = nullptr;
    return op::refuse(name, e.what());
  }
  return acl::kSuccess;
}

}  // namespace

int CreateContext(Context** context) { return *context = new Context, acl::kSuccess; }
int DestroyContext(Context* context) { return delete context, acl::kSuccess; }
int DestroyOperation(Operation* operation) { return delete operation, acl::kSuccess; }

template <class Param>
int CreateOperation(const Param&, Operation** made) {
  *made = nullptr;
  return op::refuse("CreateOperation", "of the ATB operations PagedAttention, Rope, ReshapeAndCache and Linear are simulated");
}
template <>
int CreateOperation(const infer::PagedAttentionParam& param, Operation** made) {
  return *made = new PagedAttention(param), acl::kSuccess;
}
template <>
int CreateOperation(const infer::RopeParam& param, Operation** made) {
  return create("RopeOperation", rope, param, made);
}
template <>
int CreateOperation(const infer::ReshapeAndCacheParam& param, Operation** made) {
  return create("ReshapeAndCacheOperation", reshape_and_cache, param, made);
}
template <>
int CreateOperation(const infer::LinearParam& param, Operation** made) {
  return create("LinearOperation", linear, param, made);
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
