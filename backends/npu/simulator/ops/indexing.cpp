// Reading and writing by index, joining, splitting and reordering.
#include <set>

#include "../runtime/limits.h"
#include "op.h"

using namespace op;

static c10::List<Opt<Tensor>> indices(const Tensors& tensors) {
  c10::List<Opt<Tensor>> list;
  for (auto& t : tensors) list.push_back(t.defined() ? Opt<Tensor>(t) : std::nullopt);
  return list;
}

static Tensor scattered(const Tensor& a, int64_t d, const Tensor& i, const Tensor& s, int64_t reduction) {
  if (reduction == 1) return at::scatter_add(a, d, i, s);
  if (reduction == 2) return at::scatter(a, d, i, s, "multiply");
  return at::scatter(a, d, i, s);
}

OP(aclnnEmbedding, (Tensor weight, Tensor i, Tensor out), put(out, at::embedding(weight, i)))
OP(aclnnIndexSelect, (Tensor a, int64_t d, Tensor i, Tensor out), put(out, at::index_select(a, d, i)))
OP(aclnnGather, (Tensor a, int64_t d, Tensor i, Tensor out), put(out, at::gather(a, d, i)))
OP(aclnnIndex, (Tensor a, Tensors i, Tensor out), put(out, at::index(a, indices(i))))
OP(aclnnIndexPutImpl, (Tensor a, Tensors i, Tensor v, bool accumulate, bool),
   a.index_put_(indices(i), v, accumulate))
OP(aclnnIndexCopy, (Tensor a, int64_t d, Tensor i, Tensor s, Tensor out), put(out, at::index_copy(a, d, i, s)))
OP(aclnnInplaceIndexCopy, (Tensor a, int64_t d, Tensor i, Tensor s), a.index_copy_(d, i, s))
OP(aclnnIndexFill, (Tensor a, int64_t d, Tensor i, Scalar v, Tensor out), put(out, at::index_fill(a, d, i, v)))
OP(aclnnInplaceIndexFill, (Tensor a, int64_t d, Tensor i, Scalar v), a.index_fill_(d, i, v))
OP(aclnnInplaceIndexFillTensor, (Tensor a, int64_t d, Ints i, Scalar v), a.index_fill_(d, at::tensor(i), v))
OP(aclnnScatter, (Tensor a, int64_t d, Tensor i, Tensor s, int64_t r, Tensor out), put(out, scattered(a, d, i, s, r)))
OP(aclnnInplaceScatter, (Tensor a, int64_t d, Tensor i, Tensor s, int64_t r), a.copy_(scattered(a, d, i, s, r)))
OP(aclnnScatterValue, (Tensor a, int64_t d, Tensor i, Scalar v, int64_t, Tensor out), put(out, at::scatter(a, d, i, v)))
OP(aclnnInplaceScatterValue, (Tensor a, int64_t d, Tensor i, Scalar v, int64_t), a.scatter_(d, i, v))
OP(aclnnScatterAdd, (Tensor a, int64_t d, Tensor i, Tensor s, Tensor out), put(out, at::scatter_add(a, d, i, s)))
// Rows of keys and values to their slots in a paged cache. A row with a negative slot is not written: so have it the
// kernels (hicann/ops-transformer at da7cb68, scatter_pa_kv_cache_normal_not_fully_load.h; hicann/ascend-transformer-boost,
// reshape_and_cache_nd.cpp), while the documents give slots from 0 on.
using CacheWrite = Make<void (*)(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Str, Str, Ints, Ints)>;
static uint64_t cache_write_need(const CacheWrite::Kept& k) {
  auto bad = [](const std::string& why) { throw std::runtime_error(why); };
  auto &key = std::get<0>(k), &key_cache = std::get<1>(k), &slots = std::get<2>(k), &value = std::get<3>(k),
       &value_cache = std::get<4>(k);
  if (!key || !key_cache || !slots || !value || !value_cache) bad("key, value, both caches and slot_mapping are needed");
  if (std::get<5>(k) || std::get<6>(k) || std::get<7>(k)) bad("compressed caches are not simulated");
  if (std::get<8>(k) != "Norm" && !std::get<8>(k).empty()) bad("cache_mode '" + std::get<8>(k) + "' is not simulated");
  if (key->sizes.size() != 3 || key_cache->sizes.size() != 4 || slots->sizes != Ints{key->sizes[0]})
    bad("key is not [T, heads, dim], its cache not [blocks, block_size, heads, dim], or slot_mapping not [T]");
  if (slots->type != acl::kInt32 && slots->type != acl::kInt64) bad("slot_mapping must be int32 or int64");
  if (sim::is_on(sim::Limit::cache_write)) {
    for (auto* each : {&key, &key_cache, &value, &value_cache}) {
      auto& t = **each;
      if (t.type != key->type || (t.type != acl::kBFloat16 && t.type != acl::kHalf))
        bad(sim::by_limit(sim::Limit::cache_write, std::string("a tensor is ") + c10::toString(scalar_type(t.type))));
      int64_t stride = 1;
      for (size_t d = t.sizes.size(); d--; stride *= t.sizes[d])
        if (t.sizes[d] > 1 && t.strides[d] != stride)
          bad(sim::by_limit(sim::Limit::cache_write, "a tensor has gaps between its rows"));
    }
  }
  return 0;
}
OP_WITH_WORKSPACE(aclnnScatterPaKvCache,
   (Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache, Tensor, Tensor, Tensor, Str, Str, Ints,
    Ints),
   cache_write_need, {
     auto write = [&](const Tensor& rows, const Tensor& cache) {
       std::set<int64_t> used;
       for (int64_t row = 0; row < rows.size(0); row++) {
         int64_t slot = slots[row].item<int64_t>(), size = cache.size(1);
         if (slot < 0) continue;
         if (slot >= cache.size(0) * size) throw std::runtime_error("slot " + std::to_string(slot) + " is past the cache");
         if (sim::is_on(sim::Limit::cache_write) && !used.insert(slot).second)
           throw std::runtime_error(sim::by_limit(sim::Limit::cache_write, "slot " + std::to_string(slot) + " twice"));
         cache[slot / size][slot % size].copy_(rows[row]);
       }
     };
     write(key, key_cache);
     write(value, value_cache);
   })
OP(aclnnCat, (Tensors list, int64_t d, Tensor out), put(out, at::cat(list, d)))
OP(aclnnStack, (Tensors list, int64_t d, Tensor out), put(out, at::stack(list, d)))
OP(aclnnRepeat, (Tensor a, Ints times, Tensor out), put(out, a.repeat(times)))
OP(aclnnRepeatInterleave, (Tensor a, Tensor times, int64_t, Tensor out), put(out, at::repeat_interleave(a, times)))
OP(aclnnRepeatInterleaveWithDim, (Tensor a, Tensor times, int64_t d, int64_t, Tensor out),
   put(out, at::repeat_interleave(a, times, d)))
OP(aclnnRepeatInterleaveInt, (Tensor a, int64_t times, int64_t, Tensor out), put(out, at::repeat_interleave(a, times)))
OP(aclnnRepeatInterleaveIntWithDim, (Tensor a, int64_t times, int64_t d, int64_t, Tensor out),
   put(out, at::repeat_interleave(a, times, d)))
OP(aclnnTriu, (Tensor a, int64_t diagonal, Tensor out), put(out, at::triu(a, diagonal)))
OP(aclnnTril, (Tensor a, int64_t diagonal, Tensor out), put(out, at::tril(a, diagonal)))
OP(aclnnPermute, (Tensor a, Ints dims, Tensor out), put(out, a.permute(dims)))
OP(aclnnConstantPadNd, (Tensor a, Ints pad, Scalar v, Tensor out), put(out, at::constant_pad_nd(a, pad, v)))
OP(aclnnInplaceTriu, (Tensor a, int64_t diagonal), a.triu_(diagonal))
OP(aclnnInplaceTril, (Tensor a, int64_t diagonal), a.tril_(diagonal))
