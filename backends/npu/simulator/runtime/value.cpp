// Waiting for, and writing, a 64-bit value in device memory from a stream: what torch_npu builds ExternalEvent from
// where the runtime has it. Linked into one of the two flavours of the library only.
#include "capture.h"
#include "memory.h"
#include "report.h"

using namespace sim;

extern "C" {

aclError aclrtValueWrite(void* at, uint64_t value, uint32_t, aclrtStream stream) {
  SIM_API(aclrtValueWrite);
  if (!device_range(at, sizeof value)) return fail(acl::kInvalidParam, "aclrtValueWrite: no live device memory");
  return enqueue(stream, {"value write", nullptr, [=] {
                            *static_cast<uint64_t*>(view(at)) = value;
                            if (value) opened();
                            signals().notify_all();
                          }});
}

aclError aclrtValueWait(void* at, uint64_t value, uint32_t, aclrtStream stream) {
  SIM_API(aclrtValueWait);
  if (!device_range(at, sizeof value)) return fail(acl::kInvalidParam, "aclrtValueWait: no live device memory");
  return enqueue(stream, {"value wait", nullptr, nullptr, [=] { return *static_cast<uint64_t*>(view(at)) == value; }});
}

}  // extern "C"
