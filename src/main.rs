// SPDX-License-Identifier: Apache-2.0
//! weft: parse, log, runtime, one call, exit code.
fn main() {}
