// The part of the Ascend runtime's binary interface that torch_npu 2.13 calls, declared by us from torch_npu's own
// (BSD-licensed) call sites and checked against what the unmodified wheel passes. No vendor header is included.
#pragma once

#include <cstddef>
#include <cstdint>

using aclError = int;
using aclrtContext = void*;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclmdlRI = void*;
using aclrtTaskGrp = void*;
using aclrtHostFunc = void (*)(void*);

namespace acl {

enum Code : int {
  kSuccess = 0,
  kInvalidParam = 100000,
  kRepeatInitialize = 100002,
  kInvalidFile = 100003,
  kOpNotFound = 100024,
  kInvalidDevice = 107001,
  kContextNull = 107002,
  kModelContext = 107004,
  kEventTimestampInvalid = 107006,
  kInvalidHandle = 107017,
  kCaptureDependency = 107024,
  kStreamUnjoined = 107025,
  kStreamCaptured = 107027,
  kEventCaptured = 107028,
  kStreamNotCaptured = 107029,
  kCaptureModeForbids = 107030,
  kTaskGroupStatus = 107033,
  kTaskGroupInterrupted = 107034,
  kCaptureUnmatched = 107036,
  kCaptureWrongThread = 107038,
  kInnerNullptr = 161001,
  kOpParamInvalid = 161002,
  kUnsupported = 207000,
  kOutOfMemory = 207001,
  kNoStreamResource = 207008,
  kInternalError = 507000,
  kTaskNotSupported = 507009,
  kKernelFailed = 507015,
  kSyncTimeout = 507046,
  kCaptureInvalidated = 507903,
};

enum DataType : int {
  kFloat = 0, kHalf = 1, kInt8 = 2, kInt32 = 3, kUint8 = 4, kInt16 = 6, kInt64 = 9,
  kDouble = 11, kBool = 12, kComplex64 = 16, kComplex128 = 17, kBFloat16 = 27,
};

enum CopyKind : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum LocationType : int { kLocationHost = 0, kLocationDevice = 1, kLocationUnregistered = 2 };
enum CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum CaptureStatus : int { kNotCapturing = 0, kCapturing = 1, kInvalidated = 2 };

constexpr uint32_t kEventExternal = 0x20;
constexpr uint32_t kEventTimeLine = 0x08;

struct PointerAttributes {
  uint32_t location_id;
  int32_t location_type;
  uint32_t page_size;
  uint32_t reserved[4];
};
struct PackageVersion {
  char version[128];
  char reserved[384];
};
static_assert(sizeof(PointerAttributes) == 28 && sizeof(PackageVersion) == 512);

}  // namespace acl
