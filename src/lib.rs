// SPDX-License-Identifier: Apache-2.0
//! The weft agent as a library, so that tests and benches drive the same parts as the binary.

pub mod kernel;
pub mod lab;
pub mod options;
pub mod status;
