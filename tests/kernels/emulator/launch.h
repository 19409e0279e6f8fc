// After the kernel's own text: what it declares without a size.
#pragma once

namespace billfish { unsigned char smem[1]; }
