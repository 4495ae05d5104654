// SPDX-License-Identifier: Apache-2.0
//! `weft install-cni`: copies the CNI plugin to the directory where the container runtime expects it. It runs in an
//! init container whose image has no shell. Pods may be added and removed meanwhile, so the runtime must never see an
//! incomplete plugin, nor the error "text file busy".

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::Answer;
use crate::cli::flags::InstallFlags;
use crate::files;

/// The names under which CNI configurations call the plugin. Each name gets a copy of its own, so that flannel's own
/// plugin can replace `flannel` later.
const NAMES: [&str; 2] = ["flannel", "weft-veth"];
/// The name under which the agent itself is installed.
const AGENT: &str = "weft";
/// Mode of the files.
const MODE: u32 = 0o755;

/// An installed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Path of the file.
    pub path: PathBuf,
    /// True if the file was written, false if it was up to date.
    pub written: bool,
}

/// Installs the plugin, and `weft` itself beside it if that was asked for.
///
/// # Errors
/// As [`install`].
pub fn run(flags: &InstallFlags) -> anyhow::Result<Answer> {
    let mut done = install(&flags.from, &flags.bin_dir)?;
    // Pods do not need the program `weft`, so a failure to install it is not an error.
    match flags.agent.as_ref().map(|from| agent(from, &flags.bin_dir)).transpose() {
        Ok(copied) => done.extend(copied),
        Err(error) => eprintln!("weft: {error:#}; `weft` was not installed beside the plugin"),
    }
    let word = |written| if written { "written" } else { "was there already" };
    let lines = done.iter().map(|one| format!("{} {}\n", one.path.display(), word(one.written)));
    Ok(Answer::success(lines.collect::<String>()))
}

/// Copies `from` to `dir` under each name, and returns the files. A file is replaced by a rename, and only if its
/// content or its mode differs.
///
/// # Errors
/// `from` cannot be read or is not an ELF file, or a file cannot be written. The message names the flag.
pub fn install(from: &Path, dir: &Path) -> anyhow::Result<Vec<Installed>> {
    let plugin = read_program(from, "--from")?;
    NAMES.iter().map(|name| install_one(&plugin, dir.join(name))).collect()
}

/// Copies weft itself to `dir`. `weft cleanup` must be available on the node after all pods of weft are gone.
///
/// # Errors
/// As [`install`].
pub fn agent(from: &Path, dir: &Path) -> anyhow::Result<Installed> {
    install_one(&read_program(from, "--agent")?, dir.join(AGENT))
}

/// Reads a program. Installing anything but a program would break every pod of the node.
fn read_program(from: &Path, flag: &str) -> anyhow::Result<Vec<u8>> {
    let program = fs::read(from).with_context(|| format!("read {} ({flag})", from.display()))?;
    anyhow::ensure!(program.starts_with(b"\x7fELF"), "{} is not a Linux program ({flag})", from.display());
    Ok(program)
}

fn install_one(program: &[u8], path: PathBuf) -> anyhow::Result<Installed> {
    let shown = path.display();
    let written = write(program, &path).map_err(|error| {
        let remedy = files::remedy(&error, path.parent().unwrap_or(Path::new("/")));
        anyhow::Error::new(error)
            .context(format!("write {shown}: is --bin-dir on a disk with room, mounted read-write?{remedy}"))
    })?;
    Ok(Installed { path, written })
}

fn write(program: &[u8], path: &Path) -> io::Result<bool> {
    let usable = fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o7777 == MODE);
    if usable && fs::read(path)? == program {
        return Ok(false);
    }
    files::replace(path, program, MODE)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::{Command, Stdio};

    use super::*;

    fn written(from: &Path, dir: &Path) -> Vec<bool> {
        install(from, dir).unwrap().into_iter().map(|one| one.written).collect()
    }

    #[test]
    fn both_names_are_installed_and_only_differences_are_written() {
        let home = tempfile::tempdir().unwrap();
        let (from, dir) = (Path::new("/bin/cat"), home.path().join("opt/cni/bin"));
        assert_eq!(written(from, &dir), [true, true]);
        assert_eq!(written(from, &dir), [false, false]);
        for name in NAMES {
            let path = dir.join(name);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, MODE);
            assert_eq!(fs::read(&path).unwrap(), fs::read(from).unwrap());
        }
        fs::set_permissions(dir.join("flannel"), PermissionsExt::from_mode(0o644)).unwrap();
        fs::write(dir.join("weft-veth"), "half").unwrap();
        assert_eq!(written(from, &dir), [true, true], "a wrong mode and a wrong content must be repaired");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "no temporary file must remain");
    }

    #[test]
    fn the_agent_is_installed_as_weft() {
        let home = tempfile::tempdir().unwrap();
        let one = || agent(Path::new("/bin/cat"), home.path()).unwrap();
        let path = home.path().join("weft");
        assert_eq!(one(), Installed { path: path.clone(), written: true });
        assert_eq!(one(), Installed { path: path.clone(), written: false });
        assert_eq!(fs::read(path).unwrap(), fs::read("/bin/cat").unwrap());
        let refusal = format!("{:#}", agent(&home.path().join("none"), home.path()).unwrap_err());
        assert!(refusal.contains("(--agent): No such file"), "{refusal}");
    }

    /// Pods need the plugin, and not the program `weft` beside it.
    #[test]
    fn the_plugin_is_installed_although_weft_itself_cannot_be() {
        let home = tempfile::tempdir().unwrap();
        let bin_dir = home.path().join("bin");
        let flags = |agent: Option<PathBuf>| InstallFlags { from: "/bin/cat".into(), bin_dir: bin_dir.clone(), agent };
        let said = |agent| run(&flags(agent)).unwrap().text;
        let lines =
            |words: [&str; 2]| format!("{0}/flannel {1}\n{0}/weft-veth {2}\n", bin_dir.display(), words[0], words[1]);
        assert_eq!(said(Some(home.path().join("none"))), lines(["written"; 2]));
        fs::remove_file(bin_dir.join("weft-veth")).unwrap();
        assert_eq!(said(None), lines(["was there already", "written"]));
        let with_weft = lines(["was there already"; 2]) + &format!("{}/weft written\n", bin_dir.display());
        assert_eq!(said(Some("/bin/cat".into())), with_weft);
    }

    /// Starts a program that was just written. Another test may begin a process meanwhile, which has our open files until it executes its
    /// program. As long as that lasts, the kernel says that the file is being written.
    fn spawn(command: &mut Command) -> std::process::Child {
        loop {
            match command.spawn() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                child => return child.unwrap(),
            }
        }
    }

    #[test]
    fn a_running_plugin_is_replaced_and_continues() {
        let home = tempfile::tempdir().unwrap();
        install(Path::new("/bin/cat"), home.path()).unwrap();
        let path = home.path().join("flannel");
        let mut runs = spawn(Command::new(&path).stdin(Stdio::piped()).stdout(Stdio::null()));
        assert_eq!(written(Path::new("/bin/true"), home.path()), [true, true]);
        assert!(spawn(&mut Command::new(&path)).wait().unwrap().success());
        drop(runs.stdin.take());
        assert!(runs.wait().unwrap().success());
    }

    #[test]
    fn a_symbolic_link_is_replaced_and_not_followed() {
        let home = tempfile::tempdir().unwrap();
        let elsewhere = home.path().join("elsewhere");
        fs::write(&elsewhere, "mine").unwrap();
        symlink(&elsewhere, home.path().join("flannel")).unwrap();
        assert_eq!(written(Path::new("/bin/cat"), home.path()), [true, true]);
        assert_eq!(fs::read(elsewhere).unwrap(), b"mine");
    }

    #[test]
    fn errors_name_the_flag() {
        let home = tempfile::tempdir().unwrap();
        let refusal = |from: &Path, dir: &Path| format!("{:#}", install(from, dir).unwrap_err());
        let text = home.path().join("text");
        fs::write(&text, "#!/bin/sh\n").unwrap();
        assert!(refusal(&text, home.path()).contains("is not a Linux program (--from)"));
        assert!(refusal(&home.path().join("none"), home.path()).contains("(--from): No such file"));
        assert!(refusal(Path::new("/bin/cat"), &text).contains("is --bin-dir"));
    }
}
