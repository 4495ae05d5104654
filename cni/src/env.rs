// SPDX-License-Identifier: Apache-2.0
//! The request of the container runtime, which is in the CNI_* variables. Nothing else of the plugin reads the environment.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;

use crate::spec::{Error, code};

/// The variables that a plugin gets.
const NAMES: [&str; 7] =
    ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH", "CNI_NETNS_OVERRIDE"];

/// What the plugin must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Connect a pod to the network.
    Add,
    /// Undo ADD.
    Del,
    /// Check that everything is as ADD left it.
    Check,
    /// Report the supported versions of the specification.
    Version,
    /// Undo ADD for all pods that do not exist any more.
    Gc,
    /// Report whether a pod could be connected now.
    Status,
}

impl Verb {
    /// Returns its name in CNI_COMMAND.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Add => "ADD",
            Verb::Del => "DEL",
            Verb::Check => "CHECK",
            Verb::Version => "VERSION",
            Verb::Gc => "GC",
            Verb::Status => "STATUS",
        }
    }

    /// Returns true if the verb concerns one pod.
    fn concerns_one_pod(self) -> bool {
        matches!(self, Verb::Add | Verb::Del | Verb::Check)
    }
}

/// One call of the plugin. A text is empty if its variable is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// CNI_COMMAND.
    pub verb: Verb,
    /// CNI_CONTAINERID.
    pub container: String,
    /// CNI_NETNS: the path of the pod's network namespace.
    pub netns: String,
    /// CNI_IFNAME.
    pub ifname: String,
    /// CNI_ARGS.
    pub args: String,
    /// CNI_PATH: the directories of plugins, separated by colons.
    pub path: String,
    /// CNI_NETNS_OVERRIDE: true if the pod may be in the namespace in which the plugin runs.
    pub netns_override: bool,
}

impl Request {
    /// Reads the environment of the process. Returns `None` without CNI_COMMAND, because then a person started the plugin.
    ///
    /// # Errors
    /// [`code::ENVIRONMENT`] if a variable is missing or wrong.
    pub fn from_env() -> Result<Option<Request>, Error> {
        let value = |name: &'static str| Some((name, std::env::var_os(name)?.into_string().ok()?));
        Request::read(&NAMES.into_iter().filter_map(value).collect())
    }

    fn read(vars: &BTreeMap<&str, String>) -> Result<Option<Request>, Error> {
        let text = |name: &str| vars.get(name).cloned().unwrap_or_default();
        let verb = match text("CNI_COMMAND").as_str() {
            "" => return Ok(None),
            "ADD" => Verb::Add,
            "DEL" => Verb::Del,
            "CHECK" => Verb::Check,
            "VERSION" => Verb::Version,
            "GC" => Verb::Gc,
            "STATUS" => Verb::Status,
            other => return Err(Error::new(code::ENVIRONMENT, format!("unknown CNI_COMMAND: {other}"))),
        };
        let netns_override = matches!(text("CNI_NETNS_OVERRIDE").to_ascii_uppercase().as_str(), "TRUE" | "1");
        let request = Request {
            verb,
            container: text("CNI_CONTAINERID"),
            netns: text("CNI_NETNS"),
            ifname: text("CNI_IFNAME"),
            args: text("CNI_ARGS"),
            path: text("CNI_PATH"),
            netns_override,
        };
        request.check()?;
        Ok(Some(request))
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |msg: String| Err(Error::new(code::ENVIRONMENT, msg));
        let one_pod = self.verb.concerns_one_pod();
        let netns = matches!(self.verb, Verb::Add | Verb::Check);
        let wanted = [
            ("CNI_CONTAINERID", &self.container, one_pod),
            ("CNI_NETNS", &self.netns, netns),
            ("CNI_IFNAME", &self.ifname, one_pod),
            ("CNI_PATH", &self.path, self.verb != Verb::Version),
        ];
        let missing: Vec<_> =
            wanted.iter().filter(|(_, value, needed)| *needed && value.is_empty()).map(|(name, ..)| *name).collect();
        if !missing.is_empty() {
            return wrong(format!("required env variables [{}] missing", missing.join(",")));
        }
        if one_pod && !is_name(&self.container) {
            return wrong(format!("invalid characters in CNI_CONTAINERID {:?}", self.container));
        }
        let space_or_separator = |c: char| c == '/' || c == ':' || c.is_whitespace();
        let dots = self.ifname == "." || self.ifname == "..";
        if one_pod && (dots || self.ifname.len() > 15 || self.ifname.contains(space_or_separator)) {
            return wrong(format!("CNI_IFNAME {:?} is not the name of an interface", self.ifname));
        }
        Ok(())
    }

    /// Checks that the pod's namespace exists and is not the one in which the plugin runs. There, the plugin would change the network of
    /// the host.
    ///
    /// # Errors
    /// [`code::NETNS`] if it is missing, or is the plugin's own.
    pub fn check_netns(&self) -> Result<(), Error> {
        let wrong = |text: String| Error::new(code::NETNS, text);
        match self.is_own_netns() {
            Err(error) => Err(wrong(format!("netns {}: {error}", self.netns))),
            Ok(true) => Err(wrong(format!("netns {} is the plugin's own", self.netns))),
            Ok(false) => Ok(()),
        }
    }

    /// Returns true if the pod's namespace is the one in which the plugin runs, which is the host's. With CNI_NETNS_OVERRIDE it is always
    /// false, because the caller allows that.
    ///
    /// # Errors
    /// One of the two namespaces cannot be read. In most cases, the pod's does not exist.
    pub fn is_own_netns(&self) -> std::io::Result<bool> {
        let (theirs, ours) = (std::fs::metadata(&self.netns)?, std::fs::metadata("/proc/self/ns/net")?);
        Ok(!self.netns_override && (theirs.dev(), theirs.ino()) == (ours.dev(), ours.ino()))
    }
}

/// Returns true if there is a namespace at this path. One that was unmounted leaves an empty file there.
pub fn is_namespace(path: &str) -> bool {
    let device = |path: &str| std::fs::metadata(path).ok().map(|about| about.dev());
    // All namespaces are in one file system of the kernel.
    device(path).is_some_and(|device_of_path| device("/proc/self/ns/net") == Some(device_of_path))
}

/// Returns true if the text can be the ID of a container or the name of a network. Both become names of files.
pub fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&'static str, &str)]) -> Result<Option<Request>, Error> {
        Request::read(&pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect())
    }

    #[test]
    fn each_verb_needs_its_own_variables() {
        assert_eq!(read(&[]), Ok(None), "a person started us");
        let full = [
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/x"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let needs: [(&str, &[&str]); 6] = [
            ("ADD", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]),
            ("CHECK", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]),
            ("DEL", &["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"]),
            ("GC", &["CNI_PATH"]),
            ("STATUS", &["CNI_PATH"]),
            ("VERSION", &[]),
        ];
        for (verb, needed) in needs {
            for (left_out, _) in full {
                let mut vars: Vec<_> = full.iter().copied().filter(|(name, _)| *name != left_out).collect();
                vars.push(("CNI_COMMAND", verb));
                let result = read(&vars);
                if needed.contains(&left_out) {
                    let error = result.unwrap_err();
                    assert_eq!(error.code, code::ENVIRONMENT, "{verb} without {left_out}");
                    assert!(error.msg.contains(left_out), "{verb} without {left_out}: {error}");
                } else {
                    assert!(result.is_ok(), "{verb} without {left_out}: {result:?}");
                }
            }
        }
    }

    /// In its own namespace, the plugin would change the network of the host. A caller may ask for just that.
    #[test]
    fn the_own_namespace_is_refused_unless_the_caller_allows_it() {
        let request = |given: Option<&str>, netns: &str| {
            let mut vars = vec![
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "c1"),
                ("CNI_NETNS", netns),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/opt/cni/bin"),
            ];
            vars.extend(given.map(|given| ("CNI_NETNS_OVERRIDE", given)));
            read(&vars).unwrap().unwrap()
        };
        let own = "/proc/self/ns/net";
        for given in [None, Some(""), Some("0"), Some("false"), Some("yes")] {
            let error = request(given, own).check_netns().unwrap_err();
            assert_eq!((error.code, error.msg.as_str()), (code::NETNS, "netns /proc/self/ns/net is the plugin's own"));
            assert!(request(given, own).is_own_netns().unwrap(), "{given:?}");
        }
        for given in ["1", "true", "True", "TRUE"] {
            assert_eq!(request(Some(given), own).check_netns(), Ok(()), "{given}");
            assert!(!request(Some(given), own).is_own_netns().unwrap(), "{given}");
            let error = request(Some(given), "/nowhere").check_netns().unwrap_err();
            assert_eq!(error.code, code::NETNS, "a namespace that does not exist is refused also then");
        }
    }

    #[test]
    fn a_file_or_a_directory_is_no_namespace() {
        assert!(is_namespace("/proc/self/ns/net") && is_namespace("/proc/self/ns/mnt"));
        for other in ["", "/nowhere", "/proc/self/ns", "/proc/self/status", "/dev/null"] {
            assert!(!is_namespace(other), "{other:?}");
        }
    }

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
        let rows = [
            ("../x", "eth0"),
            (".x", "eth0"),
            ("a/b", "eth0"),
            ("a:b", "eth0"),
            ("-a", "eth0"),
            ("c1", "a/b"),
            ("c1", ".."),
            ("c1", "a:b"),
            ("c1", "a b"),
            ("c1", "sixteen-letters-"),
        ];
        for (container, ifname) in rows {
            let error = read(&[
                ("CNI_COMMAND", "DEL"),
                ("CNI_CONTAINERID", container),
                ("CNI_IFNAME", ifname),
                ("CNI_PATH", "/"),
            ])
            .unwrap_err();
            assert_eq!(error.code, code::ENVIRONMENT, "{container} {ifname}");
        }
        assert_eq!(read(&[("CNI_COMMAND", "FLY")]).unwrap_err().code, code::ENVIRONMENT);
    }

    #[test]
    fn an_interface_may_have_the_longest_name_that_the_kernel_allows() {
        let of = |ifname: &str| {
            read(&[("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", ifname), ("CNI_PATH", "/")])
        };
        assert!(of("fifteen-letters").is_ok() && of("sixteen-letters-").is_err());
    }
}
