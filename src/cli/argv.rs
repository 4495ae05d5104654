// SPDX-License-Identifier: Apache-2.0
//! Converts a command line in the form of Go's flag package into the form that clap reads. The existing flags and the environment are inputs.
//!
//! In Go's `flag` package, a flag begins with one dash or two. Its value follows as `-flag=value` or `-flag value`, and may itself begin with a
//! dash. A boolean flag takes a value only after `=`. flannel's package `flagutil` adds the environment: a flag that is not on the command
//! line is read from the variable `FLANNELD_NAME`, in capitals and with `_` for `-`. An empty variable counts as not set.

use std::collections::BTreeMap;

/// The long names of the flags of one command, each with true if it takes a value. A boolean flag takes a value only after `=`.
pub type Flags = BTreeMap<String, bool>;

/// Converts the arguments after the name of the command into the form of clap: `--flag` or `--flag=value`. Other words stay as they are.
pub fn normalize(args: &[String], flags: &Flags) -> Vec<String> {
    let mut out = Vec::with_capacity(args.len());
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            out.push(arg.clone());
            out.extend(args.by_ref().cloned());
            break;
        }
        let Some(name) = flag_name(arg) else {
            out.push(arg.clone());
            continue;
        };
        let dashed = format!("--{}", arg.trim_start_matches('-'));
        match flags.get(name) {
            Some(true) if !arg.contains('=') => match args.next() {
                Some(value) => out.push(format!("{dashed}={value}")),
                None => out.push(dashed),
            },
            Some(_) => out.push(dashed),
            // clap would read an unknown word after one dash as several short flags, and its error would name only the first letter.
            None if name.len() > 1 => out.push(dashed),
            None => out.push(arg.clone()),
        }
    }
    out
}

/// Appends the flags that are not given and that the environment sets. Returns the flag and the variable for each of them.
pub fn add_env(args: &mut Vec<String>, flags: &Flags, env: impl Fn(&str) -> Option<String>) -> Vec<(String, String)> {
    let given: Vec<String> = args.iter().filter_map(|arg| flag_name(arg).map(str::to_owned)).collect();
    let mut added = Vec::new();
    for flag in flags.keys().filter(|flag| !given.contains(flag)) {
        let variable = variable(flag);
        if let Some(value) = env(&variable).filter(|value| !value.is_empty()) {
            args.push(format!("--{flag}={value}"));
            added.push((flag.clone(), variable));
        }
    }
    added
}

/// Returns the variable of a flag. For `subnet-file` that is `FLANNELD_SUBNET_FILE`.
pub fn variable(flag: &str) -> String {
    format!("FLANNELD_{}", flag.replace('-', "_").to_uppercase())
}

/// Returns the name in `-name`, `--name` or `-name=value`, or `None` if the argument is not a flag.
fn flag_name(arg: &str) -> Option<&str> {
    let rest = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-'))?;
    let name = rest.split('=').next().unwrap_or(rest);
    name.starts_with(|c: char| c.is_ascii_alphabetic()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Flags {
        let of = |(name, takes): &(&str, bool)| ((*name).to_owned(), *takes);
        let table = [("iface", true), ("ip-masq", false), ("v", true), ("vmodule", true), ("etcd-password", true)];
        table.iter().map(of).collect()
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn flags_in_the_form_of_go_are_converted() {
        let table = [
            ("-iface eth0", "--iface=eth0"),
            ("-iface=eth0", "--iface=eth0"),
            ("--iface eth0 --iface eth1", "--iface=eth0 --iface=eth1"),
            ("-ip-masq -iface=a", "--ip-masq --iface=a"),
            ("--ip-masq=false", "--ip-masq=false"),
            ("-v 4", "--v=4"),
            ("-v=4", "--v=4"),
            ("-vmodule=a=1", "--vmodule=a=1"),
            ("-etcd-password -secret", "--etcd-password=-secret"),
            ("-unknown", "--unknown"),
            ("-h -o json", "-h -o json"),
            ("-iface", "--iface"),
            ("-- -iface", "-- -iface"),
            ("word - 10", "word - 10"),
        ];
        for (given, wanted) in table {
            assert_eq!(normalize(&words(given), &flags()), words(wanted), "{given}");
        }
    }

    #[test]
    fn the_environment_sets_flags_that_are_not_given() {
        let env = |name: &str| match name {
            "FLANNELD_IFACE" => Some("eth9".to_owned()),
            "FLANNELD_IP_MASQ" => Some("true".to_owned()),
            "FLANNELD_ETCD_PASSWORD" => Some(String::new()),
            _ => None,
        };
        let mut args = words("--iface=eth0");
        let added = add_env(&mut args, &flags(), env);
        assert_eq!(args, words("--iface=eth0 --ip-masq=true"));
        assert_eq!(added, vec![("ip-masq".to_owned(), "FLANNELD_IP_MASQ".to_owned())]);
        assert_eq!(variable("log_backtrace_at"), "FLANNELD_LOG_BACKTRACE_AT");
    }
}
