// SPDX-License-Identifier: Apache-2.0
//! The plugin in place of flannel's, called as a runtime does, with real delegates in namespaces of the tests' own.

#[path = "plugin/site.rs"]
mod site;
#[path = "plugin/verbs.rs"]
mod verbs;
